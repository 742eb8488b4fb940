"""What a policy is told of a step: only of the requests that decode, and only if it learns."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.decision import StepView
from faser_trtllm.core.plan import DraftResult, ScheduledRequest, SchedulerOutput, VerifyResult
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.kvcache.manager import KVCacheManager
from faser_trtllm.policy.fixed import FixedPolicy
from faser_trtllm.scheduler.outcome import step_outcome
from faser_trtllm.scheduler.scheduler import Scheduler, SchedulerLimits

COLUMNS = ("decoding", "num_pending", "num_verified", "num_pruned", "num_tested", "num_accepted")


def make_request(num_computed_tokens):
    request = Request("r", range(8), SamplingParams(max_tokens=20), max_seq_len=64, max_draft_len=4)
    request.num_computed_tokens = num_computed_tokens
    return request


def make_step(entries, pruned):
    """entries: (is decoding, new drafts, verified, accepted, pruned, ending) per request of the plan."""
    scheduled = [ScheduledRequest(make_request(7 if e[0] else 2), 1 if e[0] else 3, e[1], e[1]) for e in entries]
    decoding = [s.request for s, e in zip(scheduled, entries, strict=True) if e[0]]
    plan = SchedulerOutput(tuple(scheduled), StepView(decoding, 0, 0, 0.0))
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


class Learning(FixedPolicy):
    def __init__(self):
        super().__init__(2)
        self.outcomes = []

    def wants_outcome(self, is_speculative):
        return True

    def observe(self, outcome):
        self.outcomes.append(outcome)


@pytest.mark.parametrize("policy", [Learning(), FixedPolicy(2)])
def test_whoever_wants_it_is_told_of_every_step_that_decoded(policy, monkeypatch):
    gathered = []
    module = "faser_trtllm.scheduler.scheduler.step_outcome"
    monkeypatch.setattr(module, lambda *step: gathered.append(step_outcome(*step)) or gathered[-1])
    kv = KVCacheManager(16, 4, 2, 8)
    scheduler = Scheduler(kv, SchedulerLimits(2, 16, 32, 4), policy, ManualClock())
    scheduler.add(make_request(0))
    draw = random.Random(0)
    num_decoded = num_generated = 0
    view = None
    while scheduler.has_work():
        plan = scheduler.schedule()
        if plan.view is not view:  # of a plan that holds
            assert plan.view.num_generated == num_generated
        view = plan.view
        num_decoded += bool(plan.view.decoding)
        request = plan.scheduled[0].request
        new = plan.scheduled[0].num_drafts - request.num_drafts
        accepted = draw.randint(0, new)
        ids = np.zeros((1, 5), np.int32).tolist()
        result = VerifyResult(ids, [accepted + 1], [accepted], [new], [False], [""], [False])
        outputs = scheduler.update(plan, DraftResult([new], [request.num_tokens + new]), result)
        num_generated += sum(len(output.new_token_ids) for output in outputs)
    learns = isinstance(policy, Learning)
    assert len(gathered) == (num_decoded if learns else 0)
    if learns:
        assert policy.outcomes == gathered
