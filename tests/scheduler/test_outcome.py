"""What a step found, for reports: only of the requests that decode, and the rows of prompts in the same pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.core.decision import StepView
from faser_trtllm.core.plan import DraftResult, ScheduledRequest, ScheduledRequests, SchedulerOutput, VerifyResult
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.scheduler.outcome import step_outcome
from tests.support.executor_harness import Setup, run

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


class Watched(Setup):
    """Keeps the outcome of every step that decodes, as a watcher sees it: after the step's tokens are committed."""

    def open(self, trace=None):
        self.outcomes = []
        executor = super().open(trace)
        executor.watch(self)
        return executor

    def step(self, plan, drafts, result, times_s):
        if plan.view.decoding:
            self.outcomes.append(step_outcome(plan, drafts, result))

    def finished(self, request):
        pass


@pytest.mark.parametrize(
    ("policy", "max_num_tokens", "length", "chunks"),
    [
        ("off", 16, 10, [10]),
        ("off", 16, 18, [15, 3]),
        ("off", 16, 16, [15]),  # a token that is left alone is a frontier of its own
        ("off", 2, 4, [1, 1, 1]),
        ("fixed:2", 16, 10, [10]),
        ("fixed:2", 16, 16, [13, 3]),
    ],
)
def test_a_prompt_counts_all_its_rows_in_the_step_in_which_it_ends(policy, max_num_tokens, length, chunks):
    """A request decodes, and a prompt joins it, of which a step runs what the other one leaves."""
    setup = Watched(policy=policy, max_batch_size=2, max_num_tokens=max_num_tokens, chunk_unit_size=1, reuse=False)
    first, second = SamplingParams(max_tokens=30), SamplingParams(max_tokens=2)
    collector = run(setup, [([1, 2], first), ([3] * length, second)], arrivals=[0, 4])
    assert {key: len(tokens) for key, tokens in collector.tokens.items()} == {"0": 30, "1": 2}
    assert [o.num_context_rows for o in setup.outcomes if o.num_context_rows] == chunks
    for outcome in setup.outcomes:
        assert outcome.num_rows == outcome.num_context_rows + len(outcome.decoding) + sum(outcome.num_verified)
        assert len(outcome.num_accepted) == len(outcome.decoding)
