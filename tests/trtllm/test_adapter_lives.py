"""Random lives under TensorRT-LLM's schedulers: priorities, deadlines, cancels, faults, ping-pong; nothing leaks."""

from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from faser_trtllm.config import CapacitySchedulerPolicy, ContextChunkingPolicy
from tests.support.effort import examples, pick
from tests.trtllm.life import TrtllmLife

pytestmark = pytest.mark.usefixtures("modules")


@settings(max_examples=examples(30))
@given(
    seed=st.integers(0, 2**32),
    tokens_per_block=st.sampled_from([1, 2, 4, 16]),
    spare_blocks=st.integers(0, 12),
    max_batch_size=st.integers(1, 6),
    spare_rows=st.integers(0, 20),
    chunk_unit_size=st.sampled_from([1, 4, 16]),
    enable_chunked_context=st.booleans(),
    capacity_policy=st.sampled_from(CapacitySchedulerPolicy),
    chunking_policy=st.sampled_from(ContextChunkingPolicy),
)
def test_any_setting_serves_every_request_exactly(seed, enable_chunked_context, capacity_policy, **setting):
    # Without chunks MAX_UTILIZATION refuses what it could not resume; test_adapter.py has that.
    assume(enable_chunked_context or capacity_policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT)
    options = setting | {"enable_chunked_context": enable_chunked_context, "capacity_policy": capacity_policy}
    TrtllmLife(seed, **options).run(50)


def test_drafts_without_blocks_wait_and_the_draft_model_runs_them_again():
    """A life in which rows and blocks are short at once, while the draft model is ahead."""
    life = TrtllmLife(
        9,
        chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS,
        tokens_per_block=4,
        spare_blocks=3,
        max_batch_size=4,
        spare_rows=13,
        chunk_unit_size=16,
        capacity_policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
    )
    assert life.run(60)["drafts_without_blocks"]


@pytest.mark.parametrize("chunking_policy", list(ContextChunkingPolicy)[: pick(1, None)])
def test_crowded_lives_see_every_event_and_stay_exact(chunking_policy):
    """Counts what happened, so that the checks cannot pass because nothing did."""
    seen = Counter()
    sizes = [(2, 10, 6, 5), (2, 60, 6, 45), (1, 0, 2, 4), (1, 0, 2, 4), (1, 0, 3, 2), (1, 0, 3, 2)]
    for seed, (tokens_per_block, spare_blocks, max_batch_size, spare_rows) in enumerate(sizes):
        life = TrtllmLife(
            seed,
            chunking_policy=chunking_policy,
            tokens_per_block=tokens_per_block,
            spare_blocks=spare_blocks,
            max_batch_size=max_batch_size,
            spare_rows=spare_rows,
            capacity_policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
            chunk_unit_size=4,
        )
        seen += life.run(200)
    events = ["admitted", "preempted", "accepted", "carried", "short_of_rows", "chunks", "only_drafted"]
    events += ["timeouts", "stop", "length", "error"]
    assert not [event for event in events if seen[event] < 4], dict(seen)
    assert seen["drafts_without_blocks"], "the rarest: rows and blocks are short at once"
