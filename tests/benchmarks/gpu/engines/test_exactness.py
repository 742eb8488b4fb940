"""The section "exactness" finds no fault where there is none, and one where there is."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.engines import exactness
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import open_pair
from benchmarks.gpu.options import GpuBenchOptions
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import CheckpointWeights
from tests.benchmarks.gpu.harness import bench_on, emulator, walk


def test_a_distribution_that_is_wrong_is_found(options: GpuBenchOptions) -> None:
    """Drafts accepted without a test: a chi-square that sees nothing wrong in it would be no test."""

    class Credulous:
        def launch(self, kernel: str, grid: Any, block: Any, arguments: Any, stream: int = 0) -> None:
            inner.launch(kernel, grid, block, arguments, stream)
            if kernel == "accept":
                case.result.token_ids[:, 0] = torch.from_numpy(case.host_drafts)

    inner = emulator("accept", None)
    bench = bench_on(options, emulator)
    exactness._accept_distribution(bench)
    assert not bench.record.data["errors"]

    class Recorded(exactness.AcceptCase):
        def __init__(self, machine: Any, mode: int, logits: Any, drafts: Any, *rest: Any) -> None:
            nonlocal case
            super().__init__(machine, mode, logits, drafts, *rest)
            self.host_drafts = drafts[:, 0].astype(np.int32)
            case = self

    case: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactness, "AcceptCase", Recorded)
        bench = bench_on(options, lambda stem, defines: Credulous())
        exactness._accept_distribution(bench)
    assert "does not follow the target" in bench.record.data["errors"][0]


def test_exactness_finds_no_fault(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "SPELLINGS", ("fixed:2", "fixed:2,mode=draft_ahead"))
    monkeypatch.setattr(exactness, "DRY_NUM_SAMPLES", 12)
    found = walk("exactness", options)
    assert found["values"]["num_faults"] == 0
    table = found["tables"][0]
    assert [row[0] for row in table["rows"]] == ["fixed:2", "fixed:2,mode=draft_ahead"]
    assert all(row[-1] == "0" for row in table["rows"])


def test_exactness_finds_a_fault(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token changed to an unlikely one: its logit is far from the best."""
    honest = exactness.run_jobs

    def wrong(pair: Any, policy: Any, jobs: Any, concurrency: int) -> Any:
        tokens, _ = honest(pair, exactness.policy_of(pair, "off"), jobs, concurrency)
        if policy.name == "off":
            return tokens, 0
        known = [*jobs[0].prompt, *tokens[0][:2]]
        worst = int(exactness.last_logits(pair, known, 1).argmin())
        return ((*tokens[0][:2], worst, *tokens[0][3:]), *tokens[1:]), 0

    monkeypatch.setattr(exactness, "run_jobs", wrong)
    bench = bench_on(options)
    with open_pair(bench, "1B", PairLimits(2, 48, 64)) as pair:
        exactness.greedy(bench, pair, 2, {"fixed:2": exactness.policy_of(pair, "fixed:2")})
    assert bench.record.data["values"]["num_faults"] == 1
    assert "request 0 parts at token 2" in bench.record.data["errors"][0]


def test_a_pass_gives_the_same_logits_in_pieces(options: GpuBenchOptions) -> None:
    """last_logits, whatever the rows of its last pass, are those of the trained model in fp32, to bf16's error."""
    tokens = list(np.random.default_rng(0).integers(2, 290, 30))
    config = load_model_config(options.checkpoint_dir)
    with CheckpointWeights(options.checkpoint_dir) as weights:
        wanted = ReferenceModel(config, weights).logits(tokens)[-1].numpy()
    with open_pair(bench_on(options), "1B", PairLimits(2, 48, 16)) as pair:
        for rows in (1, 5, 30):
            found = exactness.last_logits(pair, tokens, rows)
            assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


def test_the_chi_square_tail_is_close_to_the_tables() -> None:
    for statistic, freedom, p in ((3.841, 1, 0.05), (18.307, 10, 0.05), (37.566, 20, 0.01), (10.0, 10, 0.4405)):
        assert math.isclose(exactness.chi_square_tail(statistic, freedom), p, abs_tol=3e-3)
    assert exactness.chi_square_tail(5.0, 0) == 1.0


def test_two_samples_of_one_distribution_pass_and_of_two_distributions_do_not() -> None:
    rng = np.random.default_rng(1)

    def sample(p: list[float]) -> Counter[tuple[int, ...]]:
        return Counter((int(i),) for i in rng.choice(4, 2000, p=p))

    same = exactness.two_samples(sample([0.5, 0.3, 0.199, 0.001]), sample([0.5, 0.3, 0.199, 0.001]))
    other = exactness.two_samples(sample([0.5, 0.3, 0.199, 0.001]), sample([0.42, 0.38, 0.199, 0.001]))
    assert exactness.chi_square_tail(*same) > 1e-3
    assert exactness.chi_square_tail(*other) < 1e-4
