"""A profile of a mixture of experts runs tokens of its own in each slot, and counts the experts that passes read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.core.closing import Closing
from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.core.cost_table import CostTable, Fingerprint
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.fingerprint import PROFILE, fingerprint_of
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.profiling.grid import Limits
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.probe import Probe
from faser_trtllm.profiling.profile import measure_passes, profile_engine_dir
from faser_trtllm.sampling.draft_probs import HostDraftProbs
from faser_trtllm.sampling.rejection import CpuRejectionSampler
from tests.support.moe_checkpoints import make_moe_checkpoint

VOCAB_SIZE, MAX_SEQ_LEN, NUM_REQUESTS = 512, 128, 16
NUM_EXPERTS, TOP_K = 64, 4
LIMITS = Limits(max_rows=128, max_num_requests=NUM_REQUESTS, max_context=64, max_draft_len=8)


class RoutedByToken(Closing):
    """A target whose rows take the experts of their tokens: drawn for each, so two tokens share them by chance."""

    def __init__(self, num_experts: int) -> None:
        sizes = {"num_blocks": NUM_REQUESTS * 8, "tokens_per_block": 16, "max_num_tokens": 256}
        self.spec = EngineSpec(
            VOCAB_SIZE,
            MAX_SEQ_LEN,
            num_layers=1,
            max_batch_size=NUM_REQUESTS,
            segments=(0, 1),
            num_experts=num_experts,
            top_k=TOP_K if num_experts else 0,
            **sizes,
        )
        rng = np.random.default_rng(3)
        self._experts = np.array([rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(VOCAB_SIZE)])
        self.distinct_experts = 0.0
        self.tokens_by_shape: dict[tuple[int, int], np.ndarray] = {}

    def forward(self, batch):
        if self.spec.num_experts:
            self.distinct_experts = float(np.unique(self._experts[batch.token_ids]).size)
        self.tokens_by_shape.setdefault((batch.num_rows, batch.num_requests), batch.token_ids)
        return np.zeros((batch.logit_rows.size, VOCAB_SIZE), np.float32)

    def use(self, place) -> None: ...

    def close(self) -> None: ...


class HostProbe(Probe):
    num_units = 1


def measured(num_experts: int):
    """Return what a quick profile measured, and the engine that it ran."""
    target = RoutedByToken(num_experts)
    sampler = CpuRejectionSampler(VOCAB_SIZE, 8, HostDraftProbs(NUM_REQUESTS, 8, VOCAB_SIZE))
    with HostProbe(target, None, sampler, {"all": None}, LIMITS, NUM_REQUESTS) as probe:
        return measure_passes(probe, ProfileOptions(Path(), quick=True)), target


@pytest.fixture(scope="module")
def passes():
    return measured(NUM_EXPERTS)[0]


def count_of(passes, kind, num_rows, num_requests):
    shape = kind, num_rows, num_requests
    return max(s.num_experts for s in passes.samples if (s.kind, s.num_rows, s.num_requests) == shape)


def test_a_profile_of_many_requests_counts_the_experts_of_many(passes):
    independent = Routing(NUM_EXPERTS, TOP_K, 0.0)
    for kind, rows, requests in (("decode", 16, 16), ("verify", 16, 16), ("verify", 32, 16), ("verify", 8, 1)):
        expected = float(independent.distinct_of(rows, requests))
        assert count_of(passes, kind, rows, requests) == pytest.approx(expected, rel=0.15)


def test_some_passes_run_the_same_tokens_in_all_requests(passes):
    """So what experts take is told from what rows take."""
    counts = {s.num_experts for s in passes.samples if (s.kind, s.num_rows, s.num_requests) == ("verify", 16, 16)}
    assert min(counts) == TOP_K
    assert len(counts) == 2


def test_the_profile_says_how_much_alike_its_tokens_were_routed(passes):
    table = passes.table(Fingerprint("test", "test", 1, "test"))
    chance = TOP_K / NUM_EXPERTS
    assert table.routing is not None
    assert table.routing.overlap == pytest.approx(chance, abs=0.05)
    assert CostTable.from_json(table.to_json()).routing == table.routing


def test_a_dense_profile_runs_the_same_tokens_in_all_slots():
    passes, target = measured(0)
    assert {s.num_experts for s in passes.samples} == {0.0}
    assert passes.table(Fingerprint("test", "test", 1, "test")).routing is None
    assert len(set(target.tokens_by_shape[16, 16].tolist())) == 1
    shapes = [(s.num_rows, s.num_requests, s.context_len) for s in passes.samples if s.kind == "verify"]
    assert len(shapes) == len(set(shapes)), "no pass more than a dense model needs"


def test_a_mixtures_engine_on_this_machine_has_a_profile_with_its_counts(tmp_path):
    target = make_moe_checkpoint(tmp_path / "target", num_experts=32, top_k=4, num_layers=2)
    limits = {"max_seq_len": 512, "max_batch_size": 16, "max_num_tokens": 128}
    build_engines(BuildOptions(target, None, tmp_path / "engines", **limits))
    report = profile_engine_dir(ProfileOptions(tmp_path / "engines", quick=True, num_threads=1))
    assert count_of(report, "verify", 1, 1) == 4.0
    for kind, rows, requests in (("decode", 16, 16), ("verify", 16, 16), ("verify", 8, 1)):
        assert count_of(report, kind, rows, requests) == pytest.approx(
            float(report.table.routing.distinct_of(rows, requests)), rel=0.15
        )
    with CoreSet(num_threads=1) as cores:
        fingerprint = fingerprint_of(tmp_path / "engines", cores.num_threads)
    assert CostTable.load(tmp_path / "engines" / PROFILE, fingerprint).routing == report.table.routing
