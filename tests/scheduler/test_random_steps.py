"""Random lives of many requests against a toy model whose KV contents are modeled, so a wrong block shows at once."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.config import CapacitySchedulerPolicy
from tests.scheduler.random_lives import Life
from tests.support.effort import examples, pick


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    tokens_per_block=st.sampled_from([1, 2, 4, 16]),
    spare_blocks=st.integers(0, 12),
    max_batch_size=st.integers(1, 6),
    spare_rows=st.integers(0, 20),
    reuse=st.booleans(),
    chunk_unit_size=st.sampled_from([1, 4, 16]),
    enable_chunked_context=st.booleans(),
    capacity_policy=st.sampled_from(CapacitySchedulerPolicy),
)
def test_any_setting_serves_every_request_exactly(seed, **setting):
    Life(seed, **setting).run(60)


@pytest.mark.parametrize("policy", CapacitySchedulerPolicy)
def test_crowded_lives_see_every_event_and_stay_exact(policy):
    """Counts what happened, so that the checks above cannot pass because nothing did."""
    seen = Counter()
    for seed in range(pick(4, 8)):
        life = Life(
            seed,
            tokens_per_block=2,
            spare_blocks=(10, 60)[seed % 2],  # too few blocks, or too few rows for all that run
            max_batch_size=6,
            spare_rows=(5, 45)[seed // 2 % 2],
            capacity_policy=policy,
            chunk_unit_size=4,
        )
        seen += life.run(250)
    events = ["admitted", "accepted", "carried", "short_of_rows", "chunks", "cached_tokens", "cached_without_draft"]
    events += ["timeouts", "stop", "length", "error"]
    if policy is CapacitySchedulerPolicy.MAX_UTILIZATION:
        events.append("preempted")
    assert not [event for event in events if seen[event] < 5], dict(seen)
