"""What a report says, as values, Markdown, JSON and a picture."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.markdown import render_markdown
from benchmarks.peers.plot import write_plot
from benchmarks.peers.report import Absence, BenchReport, CaseResult, Exactness, Form, StepResult
from faser_trtllm.bench.markdown import table
from faser_trtllm.bench.stats import Agreement

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
    environment={
        "date": "2030-01-01 00:00 UTC",
        "cpu": "Some CPU",
        "memory_gib": 23.4,
        "os": "Linux 6.1 x86_64",
        "git_commit": "0123456789abcdef",
        "git_dirty": True,
        "command_line": "faser bench --output_dir out",
        "versions": {"torch": "9.9", "numpy": "1.2"},
        "other_share": 0.01,
        "steal_share": 0.0,
    },
    options={"num_threads": 2, "cores": [0, 1], "prompt_len": 64, "max_tokens": 128, "rounds": 3},
    prompts={"num_prompts": 8, "source": "standard library", "held_out": True},
    forms=(Form(1, 8),),
    cases=(
        case("faser", "off", 1, (100.0, 50.0, 100.0), times_ms={"draft_ms": 0.0, "verify_ms": 1900.0}),
        case(
            "faser",
            "fixed:2",
            1,
            (180.0, 100.0, 190.0),
            num_target_passes=500,
            num_draft_tokens=800,
            num_accepted_tokens=600,
            times_ms={"draft_ms": 500.0, "verify_ms": 1400.0},
        ),
        case("faser", "fixed:8", 1, (120.0, 60.0, 110.0)),
        case("transformers", "generate", 1, (20.0, 10.0, 20.0), agreement=Agreement(6, 8, 0.875)),
        case("transformers", "assisted:2", 1, (40.0, 20.0, 40.0)),
        case("transformers", "assisted:4", 1, (30.0, 15.0, 30.0)),
        case("faser", "off", 4, (400.0, 400.0, 400.0)),
        case("faser", "fixed:2", 4, (300.0, 300.0, 300.0)),
        case("transformers", "generate", 4, (80.0, 80.0, 80.0)),
    ),
    steps=(
        StepResult(1, "faser", 16, (1.0, 2.0, 1.0)),
        StepResult(1, "llama.cpp bf16", 16, (3.0, 6.0, 3.0)),
    ),
    exactness=(Exactness(1, 5, 8, None),),
    absences=(Absence(1, "llama.cpp q8_0", "No module named 'llama_cpp'", "pip install it"),),
)


def rows(markdown: str, heading: str) -> list[list[str]]:
    """Cells of the table under a heading."""
    section = markdown.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_summary_takes_the_best_and_compares_within_rounds() -> None:
    single, batched = rows(render_markdown(REPORT), "Summary")
    assert single[:6] == ["8 layers", "1", "100", "fixed:2", "180", "1.90 (1.80 to 2.00)"]
    assert single[6] == "9.50 (off 5.00)"  # transformers generate: 9, 10, 9.5 and 5, 5, 5
    assert single[7] == "4.75 (off 2.50)"  # the better of two assisted settings
    assert batched[3:6] == ["fixed:2", "300", "0.75 (0.75 to 0.75)"]
    assert batched[7] == "-"


def test_case_table() -> None:
    table_rows = rows(render_markdown(REPORT), "8 layers, as trained")
    assert len(table_rows) == len(REPORT.cases)
    fixed = next(row for row in table_rows if row[1:3] == ["faser", "fixed:2"])
    assert fixed[6:] == ["0.75", "2.00", "25 %", "70 %", "8/8 (100 %)"]
    peer = next(row for row in table_rows if row[1:3] == ["transformers", "generate"])
    assert peer[5] == "0.20 (0.20 to 0.20)"
    assert peer[6:] == ["-", "1.00", "-", "-", "6/8 (88 %)"]


def test_steps_and_absences_are_shown() -> None:
    markdown = render_markdown(REPORT)
    assert rows(markdown, "One forward pass, ms") == [["8 layers", "16", "1.000", "3.000 (x3.00)"]]
    assert rows(markdown, "Peers that did not run, or not as wanted") == [
        ["llama.cpp q8_0", "8 layers", "No module named 'llama_cpp'", "pip install it"]
    ]


def test_exactness_is_shown_either_way() -> None:
    assert "all tokens identical" in render_markdown(REPORT)
    broken = replace(REPORT, exactness=(Exactness(1, 5, 8, "fixed:2 at batch size 1, prompt 3, token 9"),))
    assert not broken.is_exact
    markdown = render_markdown(broken)
    assert "NOT IDENTICAL: fixed:2 at batch size 1, prompt 3, token 9" in markdown
    assert "all tokens identical" not in markdown


def test_head_names_hardware_versions_and_source() -> None:
    head = render_markdown(REPORT).split("\n## ")[0]
    for text in ("Some CPU", "2 threads on cores 0, 1", "0123456789ab with local changes", "torch 9.9"):
        assert text in head


def test_busy_machine_is_said() -> None:
    assert "do not quote" not in render_markdown(REPORT)
    for share in ("other_share", "steal_share"):
        busy = replace(REPORT, environment=REPORT.environment | {share: 0.2})
        assert "do not quote" in render_markdown(busy)


def test_pipes_cannot_break_a_table() -> None:
    assert table(("a",), [("x | y",)]).splitlines()[-1] == "| x \\| y |"


def test_json(tmp_path: Path) -> None:
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


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert write_plot(REPORT, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_no_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert not write_plot(REPORT, tmp_path / "bench.png")
    assert not (tmp_path / "bench.png").exists()
