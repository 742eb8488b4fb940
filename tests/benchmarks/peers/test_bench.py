"""The whole bench with our real engine on a tiny pair; no time is asserted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.options import BenchOptions
from benchmarks.peers.runner import run_bench
from tests.support.checkpoints import make_pair
from tests.support.effort import ONLY_ALL


@pytest.fixture
def options(tmp_path: Path) -> BenchOptions:
    target, draft = make_pair(tmp_path / "pair", num_layers=2)
    return BenchOptions(
        checkpoint_dir=target,
        draft_checkpoint_dir=draft,
        output_dir=tmp_path / "out",
        expand=(2,),
        batch_sizes=(1, 2),
        speculation=("off", "fixed:3"),
        prompt_len=16,
        max_tokens=12,
        num_prompts=2,
        num_threads=1,  # tiny products wait for a second thread more than they compute
        rounds=2,
        peers=(),
        step_rows=(1, 8),
    )


def test_bench_of_our_own_engine(options: BenchOptions) -> None:
    lines: list[str] = []
    report = run_bench(options, lines.append)
    assert report.is_exact
    assert {(case.setting, case.batch_size) for case in report.cases} == {
        (setting, size) for setting in ("off", "fixed:3") for size in (1, 2)
    }
    for case in report.cases:
        assert case.num_output_tokens == 2 * 2 * 12  # rounds x prompts x max_tokens, whatever the end ids
        assert case.agreement.num_identical == 2
        if case.setting == "off":
            assert case.num_draft_tokens == 0
            assert case.tokens_per_pass == 1.0
        else:
            assert case.num_draft_tokens > 0
            assert case.num_target_passes == case.num_output_tokens - case.num_accepted_tokens
        assert 0 < case.times_ms["verify_ms"] <= 1e3 * case.seconds
    assert {step.num_rows for step in report.steps} == {1, 8}
    data = json.loads((options.output_dir / "bench.json").read_text())
    assert len(data["cases"]) == len(report.cases)
    assert lines
    assert not list(options.output_dir.glob("engines*"))


@ONLY_ALL
@pytest.mark.slow
def test_bench_against_transformers(options: BenchOptions) -> None:
    pytest.importorskip("transformers")
    report = run_bench(replace(options, peers=("transformers",), assisted_draft_lens=(2,), rounds=1))
    assert not report.absences
    peers = [case for case in report.cases if case.system == "transformers"]
    assert {(case.setting, case.batch_size) for case in peers} == {
        ("generate", 1),
        ("assisted:2", 1),
        ("generate", 2),
    }
    for case in peers:
        assert case.num_output_tokens == 2 * 12
        assert case.agreement.prefix_share > 0  # the same weights: at least the first tokens agree
