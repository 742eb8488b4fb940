"""Tests of the host's reads while requests decode, counted by the device: once per verification, never logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.sampling_params import SamplingParams
from tests.engine.cuda.harness import build_pair
from tests.engine.cuda.host_executor import MAX_BATCH_SIZE, MAX_DRAFT_LEN
from tests.support.effort import pick
from tests.virtual_gpu.device.counters import Counters
from tests.virtual_gpu.generation import Generated, generate_cuda
from tests.virtual_gpu.plan_engines import build_plans, generate_texts
from tests.virtual_gpu.process import VirtualGpuProcess

pytestmark = pytest.mark.slow

VOCAB_SIZE = 600
TEST, DRAFTS = "engine/gpu/sampler/accept:sample", "engine/gpu/sampler/draft_state:read"
PRUNE = "engine/gpu/boundary:prune"
STOPPING = ["price:prune=off", *pick([], ["price:mode=draft_ahead,prune=off", "price:prune=on"])]
NUM_DRAFT_ARRAYS = 3  # tokens, margins, candidates
# All prompts fit the first step, so that every step verifies.
REQUESTS = [
    (
        [7 * i + j for j in range(3 + i)],
        SamplingParams(max_tokens=pick(7, 16), end_ids=(), temperature=0.7 * (i % 2), seed=i),
    )
    for i in range(MAX_BATCH_SIZE)
]


# Their outputs repeat themselves, too.
REPEATING = [
    (
        [5 + i, 9] * 4,
        SamplingParams(max_tokens=pick(12, 24), end_ids=(), temperature=0.7 * (i % 2), top_p=0.05, seed=i),
    )
    for i in range(MAX_BATCH_SIZE)
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    return build_pair(tmp_path_factory.mktemp("pair"), exit_layers=(1,), vocab_size=VOCAB_SIZE)


def _check_test_reads(found: Generated) -> None:
    """One copy and one wait for each verification, of a few numbers per request."""
    num_reads, num_bytes = found.counters.reads()[TEST]
    assert num_reads == found.stats["num_steps"] == _waits(found.counters, TEST)
    assert num_bytes <= num_reads * MAX_BATCH_SIZE * (MAX_DRAFT_LEN + 5) * 4


def _waits(counters: Counters, place: str) -> int:
    return counters.waits.get(f"wait {place}", 0)


def _num_launches(counters: Counters, kernel: str) -> int:
    return sum(counters.kernels(context).get(kernel, 0) for context in counters.work)


def test_without_drafts_the_host_reads_once_a_step(gpu: VirtualGpuProcess, engines: EngineDir) -> None:
    found = gpu.run(generate_cuda, engines, "off", REQUESTS)
    assert found.counters.reads().keys() == {TEST}
    _check_test_reads(found)


def test_drafts_are_read_once_a_call_and_not_once_a_draft_step(gpu: VirtualGpuProcess, engines: EngineDir) -> None:
    found = gpu.run(generate_cuda, engines, "fixed:4", REQUESTS)
    assert found.counters.reads().keys() == {TEST, DRAFTS}
    _check_test_reads(found)
    num_calls = _waits(found.counters, DRAFTS)
    assert 0 < num_calls <= found.stats["num_steps"]
    assert _num_launches(found.counters, "sample_rows") > 2 * num_calls, "a call has several draft steps"
    num_reads, num_bytes = found.counters.reads()[DRAFTS]
    assert num_reads == NUM_DRAFT_ARRAYS * num_calls
    assert num_bytes < num_calls * 4 * VOCAB_SIZE, "less than one row of logits"


@pytest.mark.parametrize("policy", ["fixed:4", *pick([], ["price:prune=off"])])
def test_drafts_of_the_text_are_not_read_at_all(gpu: VirtualGpuProcess, engines: EngineDir, policy: str) -> None:
    """The host makes them, and nothing runs for them."""
    found = gpu.run(generate_cuda, engines, policy, REPEATING, drafters="suffix")
    assert found.stats["num_passed_drafts_suffix"] > 0
    assert found.counters.reads().keys() == {TEST}
    _check_test_reads(found)
    assert set(found.counters.work) == {"whole"}
    assert not {"sample_rows", "take_step", "set_conditional"} & found.counters.kernels("whole").keys()


@pytest.mark.parametrize("policy", ["fixed:4", *pick([], ["price:prune=off"])])
def test_drafts_of_text_and_model_are_read_once_a_call(gpu: VirtualGpuProcess, engines: EngineDir, policy: str) -> None:
    """The loop on the device begins behind the text's drafts."""
    found = gpu.run(generate_cuda, engines, policy, REPEATING, drafters="suffix,model")
    assert min(found.stats[f"num_passed_drafts_{name}"] for name in ("suffix", "model")) > 0
    assert found.counters.reads().keys() == {TEST, DRAFTS}
    _check_test_reads(found)
    num_calls = _waits(found.counters, DRAFTS)
    assert found.counters.reads()[DRAFTS][0] == NUM_DRAFT_ARRAYS * num_calls
    assert 0 < num_calls <= found.stats["num_steps"]


def test_a_boundary_that_prunes_reads_once_more(gpu: VirtualGpuProcess, engines: EngineDir) -> None:
    found = gpu.run(generate_cuda, engines, "erratic", REQUESTS)
    assert found.stats["num_pruned_rows"] > 0
    assert found.counters.reads().keys() == {TEST, DRAFTS, PRUNE}
    _check_test_reads(found)
    num_pruned = found.counters.reads()[PRUNE][0]
    assert _waits(found.counters, PRUNE) == num_pruned <= found.stats["num_steps"]
    assert found.counters.reads()[PRUNE][1] <= num_pruned * MAX_BATCH_SIZE * 4


@pytest.mark.parametrize("policy", STOPPING)
def test_a_stop_rule_is_not_read_at_all(gpu: VirtualGpuProcess, engines: EngineDir, policy: str) -> None:
    """The price policy ends drafting on the device: one wait for the drafts of a call, whatever its steps."""
    found = gpu.run(generate_cuda, engines, policy, REQUESTS)
    assert found.counters.reads().keys() - ({PRUNE} if policy.endswith("prune=on") else set()) == {TEST, DRAFTS}
    _check_test_reads(found)
    num_calls = _waits(found.counters, DRAFTS)
    assert found.counters.reads()[DRAFTS][0] == NUM_DRAFT_ARRAYS * num_calls
    assert 0 < num_calls <= found.stats["num_steps"]
    num_draws = _num_launches(found.counters, "sample_rows")
    assert num_draws > num_calls, "a call has several draft steps"
    assert _num_launches(found.counters, "set_conditional") == num_draws
    assert _num_launches(found.counters, "take_step") == num_draws - num_calls, "no step beyond the last draw"


def test_plans_leave_their_logits_on_the_device_too(gpu: VirtualGpuProcess, tmp_path: Path) -> None:
    engine_dir = gpu.run(build_plans, tmp_path)
    for policy in ("fixed:4", "price:prune=off"):
        found = gpu.run(generate_texts, engine_dir, policy, ("The", "def main("), max_tokens=12)
        assert found.stats["num_draft_tokens"] > 0
        assert found.counters.reads().keys() == {TEST, DRAFTS}
        assert _waits(found.counters, DRAFTS) <= found.stats["num_steps"]
    text = gpu.run(generate_texts, engine_dir, "fixed:4", ("a b a b a b",), drafters=("suffix",))
    assert text.stats["num_passed_drafts_suffix"] > 0
    assert text.counters.reads().keys() == {TEST}
    logged = gpu.run(generate_texts, engine_dir, "fixed:4", ("The",), max_tokens=4, return_log_probs=True)
    assert logged.counters.reads().keys() > {TEST, DRAFTS}, "who asks for log probs gets what they are made of"
