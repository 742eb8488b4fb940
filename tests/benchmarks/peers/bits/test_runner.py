"""The comparison at equal bits: our real engine on a tiny model beside a made-up peer; no time is asserted."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.bits import runner, systems
from benchmarks.peers.bits.machine import Machine
from benchmarks.peers.bits.options import BitsOptions
from benchmarks.peers.bits.systems import Loaded
from benchmarks.peers.report import FASER
from tests.support.checkpoints import make_checkpoint

Log = list[tuple[int, int, int]]  # sequences, tokens of each, and tokens to generate


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BitsOptions:
    monkeypatch.setattr(runner, "measure_machine", lambda *arguments: Machine(10.0, 100.0))
    return BitsOptions(
        output_dir=tmp_path / "out",
        checkpoint_dir=make_checkpoint(tmp_path / "tiny"),
        random=False,
        bits=("bf16", "int4"),
        rows=(1, 3),
        prompt_len=5,
        prefill=24,
        steps=2,
        rounds=2,
        num_threads=1,
    )


def fake(log: Log, ms: float) -> Loaded:
    """Takes ms for every step and ten times as long for a prompt."""

    def run(prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        log.append((len(prompts), len(prompts[0]), max_tokens))
        return {"first_cpu_ms": [10 * ms], "step_cpu_ms": [ms] * (max_tokens - 1)}

    return Loaded("fake", {"fake": "1.0"}, 4.5, run, lambda: 3_000_000_000, lambda: None)


def opened(options: BitsOptions, bits: str, peer: systems.Opener) -> dict[str, systems.Opener]:
    return {FASER: systems.open_faser, "fake": peer}


def test_every_cell_of_every_system(options: BitsOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    log: Log = []
    monkeypatch.setattr(systems, "openers", lambda o, bits: opened(o, bits, lambda place: fake(log, 1e6)))
    report = runner.run_bits(options, lambda line: None)
    cells = {(r.bits, r.system, r.cell) for r in report.results}
    assert cells == {(b, s, c) for b in ("bf16", "int4") for s in (FASER, "fake") for c in ("1", "3", "prefill")}
    assert all(len(result.ms) == 2 for result in report.results)
    assert log[:3] == [(1, 5, 3), (3, 5, 3), (1, 24, 1)]
    assert len(log) == 2 * 3 * 3  # bits, rounds with the one that is dropped, cells
    for ours, rivals in report.cells():
        assert [rival.system for rival in rivals] == ["fake"]
        assert rivals[0].ms[0] == (1e7 if ours.cell == "prefill" else 1e6)
        assert ours.bound_ms is not None
        assert ours.bound in ("memory", "arithmetic")
    assert [bits for name, bits in report.bits_per_weight.items() if "fake" in name] == [4.5, 4.5]
    data = json.loads((options.output_dir / "bits.json").read_text())
    assert len(data["ratios"]) == 6
    assert "**no**" not in (options.output_dir / "bits.md").read_text()
