"""Drafts that cost no step: always asked for, and verified where their rows pay, whether a draft model runs or not."""

from typing import ClassVar

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.core.decision import PlanStats, StepView
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.policy.free_drafts import FreeDraftsPolicy
from faser_trtllm.policy.price import PricePolicy
from tests.policy.world import World, cost_table
from tests.support.columns import columns
from tests.support.executor_harness import toy_costs
from tests.support.sampling_slots import Slots

MAX_DRAFT_LEN = 4


def requests(n):
    made = []
    for slot in range(n):
        request = Request(str(slot), [1, 2, 3], SamplingParams(max_tokens=40), max_seq_len=64, max_draft_len=4)
        request.slot = slot
        request.num_computed_tokens = request.num_draft_computed_tokens = request.num_tokens - 1
        made.append(request)
    return made


def view(n, now_s=0.0):
    return StepView(requests(n), 0, 0, now_s)


def pending(n, log_odds):
    """Slots with MAX_DRAFT_LEN certain drafts each behind 3 tokens -> arguments of lengths()."""
    slots = Slots(n, 5, MAX_DRAFT_LEN)
    margins = np.full((n, 64), log_odds, np.float32)
    slots.draft_sources[:] = native.BY_SUFFIX
    slots.array["draft_margins"] = [row.ctypes.data for row in margins]
    slots.kept = margins
    return slots, columns(range(n), [3] * n, [MAX_DRAFT_LEN] * n)


def policies():
    costs = toy_costs()
    yield FreeDraftsPolicy(None, MAX_DRAFT_LEN, costs)
    yield FreeDraftsPolicy(PricePolicy(MAX_DRAFT_LEN, costs, 8), MAX_DRAFT_LEN, costs)


@pytest.mark.parametrize("which", [0, 1])
def test_sure_drafts_get_rows_and_doubtful_ones_none(which):
    policy = list(policies())[which]
    decision = policy.plan(view(2))
    assert decision.lengths == [MAX_DRAFT_LEN] * 2
    found = {}
    for log_odds in (6.0, -6.0):
        slots, counts = pending(2, log_odds)
        found[log_odds] = decision.verification.lengths(slots.array, *counts).tolist()
    # A pass of 4 rows costs what one of 2 does, so one row each is for nothing; 6 more cost half a pass.
    assert found[6.0] == [MAX_DRAFT_LEN] * 2
    assert sum(found[-6.0]) <= 2


def test_without_a_draft_model_it_never_runs():
    policy = FreeDraftsPolicy(None, MAX_DRAFT_LEN, toy_costs())
    assert policy.plan(view(3)).model_lengths == {}


def test_the_draft_model_gets_the_lengths_that_its_policy_planned():
    inner = PricePolicy(MAX_DRAFT_LEN, toy_costs(), 8)
    planned = inner.plan(view(2)).lengths
    policy = FreeDraftsPolicy(PricePolicy(MAX_DRAFT_LEN, toy_costs(), 8), MAX_DRAFT_LEN, toy_costs())
    assert policy.plan(view(2)).model_lengths == {slot: k for slot, k in enumerate(planned) if k}
    assert any(planned)


def test_a_probe_runs_the_lengths_that_it_measures():
    """Everywhere else, the free drafts are as many as allowed, and the rows that do not pay are left out."""

    class Watched(PricePolicy):
        plans: ClassVar = []

        def plan(self, view):
            self.plans.append(super().plan(view))
            return self.plans[-1]

    class Recorded(FreeDraftsPolicy):
        plans: ClassVar = []

        def plan(self, view):
            self.plans.append(super().plan(view))
            return self.plans[-1]

    policy = Recorded(Watched(8, cost_table(), 8), 8, cost_table())
    World(policy, 4, lambda rng, index, place: (0.0, 0.8)).run(4000)
    plans = [(asked, made) for asked, made in zip(Watched.plans, Recorded.plans, strict=True) if any(asked.lengths)]
    probes = [made.lengths == asked.lengths and made.verification is None for asked, made in plans if not asked.stop]
    assert len(probes) > 2
    assert all(probes)
    assert all(made.lengths == [8] * 4 and made.verification for asked, made in plans if asked.stop)


def test_rows_are_dearer_where_steps_bring_more():
    """Four tokens a step for the time of one: a row must bring more to be worth its time."""
    policy = FreeDraftsPolicy(None, MAX_DRAFT_LEN, toy_costs())
    before = policy.plan(view(8)).price
    for _ in range(50):
        policy.observe(PlanStats(num_steps=16, ms=16 * 2.5, verify_ms=16 * 2.5, num_tokens=16 * 32, num_requests=16 * 8,
                                 num_rows=16 * 16, num_verified=16 * 8, num_accepted=16 * 24))  # fmt: skip
    assert policy.plan(view(8, 1.0)).price > 1.5 * before


def test_nothing_decodes():
    assert list(FreeDraftsPolicy(None, MAX_DRAFT_LEN, toy_costs()).plan(StepView([], 0, 0, 0.0)).lengths) == []
