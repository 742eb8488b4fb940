"""Policies that learn, over whatever a server may show them: never an exception, decisions in bounds, finite values."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.config import DrafterName
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.sampling_params import SamplingMode
from faser_trtllm.policy.base import PlanStats, StepView
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.sampling.table import SamplingTable
from tests.policy.world import cost_table, request
from tests.support.columns import columns
from tests.support.effort import examples
from tests.support.executor_harness import toy_costs

SLOTS = 6
MAX_DRAFT_LEN = 5
TIMES_MS = st.sampled_from([0.0, 1e-9, 0.01, 1.0, 30.0, 1e7])


@st.composite
def stats(draw, num_requests: int) -> PlanStats:
    """Draw statistics of some steps with so many requests; any time may be zero or huge, alone or with the others."""
    steps = draw(st.integers(1, 40))
    n = steps * num_requests
    calls = draw(st.integers(0, steps))
    drafted = draw(st.integers(0, calls * num_requests * MAX_DRAFT_LEN)) if calls else 0
    draft_steps = draw(st.integers(calls, calls * MAX_DRAFT_LEN)) if calls else 0
    verified = draw(st.integers(0, n * MAX_DRAFT_LEN))
    accepted = draw(st.integers(0, verified))
    return PlanStats(
        num_steps=steps,
        ms=draw(TIMES_MS),
        draft_ms=draw(TIMES_MS),
        verify_ms=draw(TIMES_MS),
        num_tokens=draw(st.sampled_from([0, 1, n + accepted])),
        num_requests=n,
        num_rows=n + verified,
        num_verified=verified,
        num_pruned=draw(st.integers(0, 3)),
        num_accepted=accepted,
        num_draft_calls=calls,
        num_draft_rows=draw(st.integers(calls, 2 * calls * num_requests)) if calls else 0,
        num_draft_steps=draft_steps,
        num_drafted=min(drafted, draft_steps * num_requests),
        num_context_rows=draw(st.sampled_from([0, 0, 1, 500])),
    )


class Life:
    """Requests that come, go, are preempted and end, before one policy."""

    def __init__(self, draw, spelling: str, *drafters: DrafterName, costs: CostTable | None = None) -> None:
        costs = costs or cost_table()
        self.policy = make_policy(spelling, MAX_DRAFT_LEN, costs, SLOTS, drafters or (DrafterName.MODEL,))
        self.draw, self.now_s = draw, 0.0
        self.running = {}  # slot -> request
        self.sampling = SamplingTable(SLOTS, 4, MAX_DRAFT_LEN)

    def change(self) -> None:
        for slot in self.draw(st.sets(st.integers(0, SLOTS - 1))):
            if self.running.pop(slot, None) is None:
                mode = self.draw(st.sampled_from(list(SamplingMode)))
                tokens = self.draw(st.sampled_from([1, 2, 3, 100]))
                made = request(f"r{slot}", MAX_DRAFT_LEN, tokens, slot, mode)
                made.draft_margins[:] = self.draw(st.sampled_from([0.0, 1.0, 50.0, math.inf]))
                if self.draw(st.booleans()):  # preempted: what the draft model knew is gone
                    made.num_draft_computed_tokens = 0
                self.running[slot] = made
                self.sampling.bind(slot, made)

    def live(self, max_steps: int = 12) -> None:
        for _ in range(self.draw(st.integers(1, max_steps))):
            self.change()
            self.step()

    def step(self) -> None:
        decoding = list(self.running.values())
        self.now_s += self.draw(st.sampled_from([0.0, 0.01, 10.0, 1e6]))
        joining = self.draw(st.integers(0, SLOTS - len(decoding)))
        rows = self.draw(st.sampled_from([0, 0, 7, 300]))
        decision = self.policy.plan(StepView(decoding, rows, self.draw(st.integers(0, 3)), self.now_s, joining))
        assert len(decision.lengths) == len(decoding)
        assert all(0 <= length <= MAX_DRAFT_LEN for length in decision.lengths)
        assert decision.num_held >= 0
        assert math.isfinite(decision.price)
        assert decision.price >= 0.0
        if decision.stop is not None:
            stop = decision.stop
            for array in (stop.slope, stop.intercept, stop.prior, stop.spread, stop.row_price):
                assert np.isfinite(array).all()
            assert (stop.spread >= 0).all()
            assert (stop.spread <= np.minimum(stop.prior, 1 - stop.prior) + 1e-6).all()
            assert np.isfinite(decision.stop.step_price).all()
        if not decoding:
            return
        slots, known = [r.slot for r in decoding], [r.num_tokens for r in decoding]
        pending = [min(k, r.draft_limit) for k, r in zip(decision.lengths, decoding, strict=True)]
        if decision.verification is not None and any(pending):
            rows_each = decision.verification.lengths(self.sampling.array, *columns(slots, known, pending))
            assert all(0 <= length <= limit for length, limit in zip(rows_each, pending, strict=True))
        if decision.tested is not None and any(pending):
            accepted = [self.draw(st.integers(0, k)) for k in pending]
            outcome = [native.RECOVERED if a < k else native.BONUS for a, k in zip(accepted, pending, strict=True)]
            decision.tested.add(self.sampling.array, *columns(slots, known, accepted, outcome))
        if self.draw(st.booleans()):
            self.policy.observe(self.draw(stats(len(decoding))))


@pytest.mark.parametrize("spelling", ["price", "schedule"])
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_whatever_happens_decisions_stay_in_bounds(spelling: str, data: st.DataObject) -> None:
    life = Life(data.draw, spelling)
    life.live()
    estimator = life.policy.estimator
    assert np.isfinite(estimator.population()).all()
    assert ((estimator.population() >= 0.0) & (estimator.population() <= 1.0)).all()
    assert np.isfinite(estimator.model.slope).all()
    assert np.isfinite(estimator.model.intercept).all()


@pytest.mark.parametrize("drafters", [[DrafterName.SUFFIX], [DrafterName.SUFFIX, DrafterName.MODEL]])
@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_beside_drafts_that_cost_nothing_too(drafters: list[DrafterName], data: st.DataObject) -> None:
    Life(data.draw, "price", *drafters).live()


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_where_lanes_were_measured_too(data: st.DataObject) -> None:
    Life(data.draw, "price", costs=toy_costs()).live(max_steps=40)
