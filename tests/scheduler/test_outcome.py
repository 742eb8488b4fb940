"""What a step found, for reports: only of the requests that decode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.core.decision import StepView
from faser_trtllm.core.plan import DraftResult, ScheduledRequest, ScheduledRequests, SchedulerOutput, VerifyResult
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.scheduler.outcome import step_outcome

COLUMNS = ("decoding", "num_pending", "num_verified", "num_pruned", "num_tested", "num_accepted")


def make_request(num_computed_tokens):
    request = Request("r", range(8), SamplingParams(max_tokens=20), max_seq_len=64, max_draft_len=4)
    request.num_computed_tokens = num_computed_tokens
    return request


def make_step(entries, pruned):
    """entries: (is decoding, new drafts, verified, accepted, pruned, ending) per request of the plan."""
    scheduled = [ScheduledRequest(make_request(7 if e[0] else 2), 1 if e[0] else 3, e[1], e[1]) for e in entries]
    decoding = [s.request for s, e in zip(scheduled, entries, strict=True) if e[0]]
    plan = SchedulerOutput(ScheduledRequests.of(scheduled), StepView(decoding, 0, 0, 0.0))
    rows = [e if e[0] else (False, 0, 0, 0, 0, "carried") for e in entries]
    carried = [r[0] and r[5] == "carried" for r in rows]
    result = VerifyResult(
        [list(range(5))] * len(rows),
        [r[3] + (r[0] and r[5] == "drawn") for r in rows],
        [r[3] for r in rows],
        [r[2] for r in rows],
        carried,
        [""] * len(rows),
        [False] * len(rows),
        [r[4] for r in rows] if pruned else (),
        num_pending=[r[1] for r in rows],
    )
    return plan, DraftResult([r[1] for r in rows], [0] * len(rows)), result


ENTRIES = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 4),
        st.integers(0, 4),
        st.integers(0, 4),
        st.integers(0, 2),
        st.sampled_from(("carried", "drawn", "failed")),
    ),
    max_size=6,
)


@given(entries=ENTRIES, pruned=st.booleans())
def test_contexts_in_the_same_pass_change_nothing_but_the_rows(entries, pruned):
    mixed = step_outcome(*make_step(entries, pruned))
    alone = step_outcome(*make_step([entry for entry in entries if entry[0]], pruned))
    for name in COLUMNS[1:]:
        assert list(getattr(mixed, name)) == list(getattr(alone, name)), name
    num_contexts = sum(not entry[0] for entry in entries)
    assert mixed.num_context_rows == 3 * num_contexts
    assert mixed.num_rows == alone.num_rows + 3 * num_contexts
    assert alone.num_rows == sum(1 + entry[2] for entry in entries if entry[0])


@pytest.mark.parametrize(
    ("ending", "num_accepted", "tested"),
    [("drawn", 2, 3), ("drawn", 4, 4), ("carried", 2, 2), ("failed", 2, 2), ("drawn", 0, 1)],
)
def test_a_rejected_draft_was_tested_too(ending, num_accepted, tested):
    outcome = step_outcome(*make_step([(True, 4, 4, num_accepted, 0, ending)], pruned=False))
    assert outcome.num_tested == [tested]
    assert list(outcome.num_pruned) == [0]
