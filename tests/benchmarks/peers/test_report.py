"""The ratios of a report made by hand, as its JSON has them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.agreement import Agreement
from benchmarks.peers.report import Absence, BenchReport, CaseResult, Exactness, Form, StepResult

ALIKE = Agreement(8, 8, 1.0)


def case(system: str, setting: str, batch_size: int, rates: tuple[float, ...], **changes: object) -> CaseResult:
    result = CaseResult(
        expand=1,
        system=system,
        setting=setting,
        batch_size=batch_size,
        tokens_per_s=rates,
        seconds=2.0,
        num_output_tokens=1000,
        num_target_passes=1000,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        agreement=ALIKE,
    )
    return replace(result, **changes)  # type: ignore[arg-type]


REPORT = BenchReport(
    environment={},
    options={},
    prompts={},
    forms=(Form(1, 8),),
    cases=(
        case("faser", "off", 1, (100.0, 50.0, 100.0), times_ms={"draft_ms": 0.0, "verify_ms": 1900.0}),
        case("faser", "fixed:2", 1, (180.0, 100.0, 190.0), num_draft_tokens=800, num_accepted_tokens=600),
        case("faser", "fixed:8", 1, (120.0, 60.0, 110.0)),
        case("transformers", "generate", 1, (20.0, 10.0, 20.0)),
        case("transformers", "assisted:2", 1, (40.0, 20.0, 40.0)),
        case("faser", "off", 4, (400.0, 400.0, 400.0)),
    ),
    steps=(StepResult(1, "faser", 16, (1.0, 2.0, 1.0)), StepResult(1, "llama.cpp bf16", 16, (3.0, 6.0, 3.0))),
    exactness=(Exactness(1, 5, 8, None),),
    absences=(Absence(1, "llama.cpp q8_0", "No module named 'llama_cpp'", "pip install it"),),
)


def test_ratios_are_taken_within_a_round(tmp_path: Path) -> None:
    REPORT.write_json(tmp_path / "bench.json")
    data = json.loads((tmp_path / "bench.json").read_text())
    assert data["exact"] is True
    fixed = data["cases"][1]
    assert fixed["median_tokens_per_s"] == 180.0
    assert fixed["ratio_to_off"] == {"median": 1.9, "low": 1.8, "high": 2.0}
    assert fixed["ratio_to_peers"]["transformers assisted:2"]["median"] == pytest.approx(4.75)
    assert fixed["acceptance"] == 0.75
    assert data["steps"][1]["median_ms"] == 3.0
    assert data["absences"][0]["fix"] == "pip install it"
    best = REPORT.best_speculation(1, 1)
    assert best is not None
    assert best.setting == "fixed:2"
