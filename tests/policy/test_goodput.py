"""The arithmetic is a brute-force search's."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.ops.frontier import top_prefixes
from faser_trtllm.policy.goodput import (
    StepCosts,
    best_row,
    best_slots,
    best_slots_few,
    best_uniform,
    step_ms,
)


@st.composite
def cases(draw, max_requests=3, max_length=3):
    n, k = draw(st.integers(1, max_requests)), draw(st.integers(1, max_length))
    p = np.array(draw(st.lists(st.floats(0.01, 0.99), min_size=n * k, max_size=n * k))).reshape(n, k)
    steps = draw(st.lists(st.floats(0.0, 1.0), min_size=n * k, max_size=n * k))
    verify = np.cumsum([draw(st.floats(0.1, 2.0)), *steps])  # any staircase
    first, step = (np.cumsum([0.0, *draw(st.lists(st.floats(0.001, 0.3), min_size=n, max_size=n))]) for _ in range(2))
    return np.cumprod(p, axis=1), StepCosts(verify, first, step, draw(st.floats(0, 0.2)), draw(st.floats(0.1, 2.0)))


def _goodput(survival, lengths, costs):
    """Tokens per ms of drafting and verifying so many drafts per request."""
    n = len(lengths)
    tokens = n + sum(survival[i, :length].sum() for i, length in enumerate(lengths))
    steps = [sum(length > t for length in lengths) for t in range(max(lengths))]
    if not any(lengths):
        return n / costs.off_ms
    draft_ms = sum(costs.draft_step[a] if t else costs.draft_first[a] for t, a in enumerate(steps))
    return tokens / (draft_ms + costs.verify[sum(lengths)] + costs.overhead)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_the_best_slots_are_the_best_of_all_top_survival_cuts(case):
    survival, costs = case
    n, k = survival.shape
    choice = best_slots(survival, float(n), costs)
    cuts = [top_prefixes(survival.tolist(), m) for m in range(n * k + 1)]
    best = max(_goodput(survival, cut, costs) for cut in cuts)
    assert choice.goodput == pytest.approx(best)
    assert _goodput(survival, choice.lengths, costs) == pytest.approx(best)
    assert choice.off_goodput == pytest.approx(_goodput(survival, [0] * n, costs))


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_a_few_requests_get_the_same_slots_without_numpy(case, data):
    survival, costs = case
    n, k = survival.shape
    limits = [data.draw(st.integers(0, k)) for _ in range(n)]
    allowed = np.where(np.arange(k) < np.array(limits)[:, None], survival, 0.0)
    choice, few = best_slots(allowed, float(n), costs), best_slots_few(survival.tolist(), float(n), costs, limits)
    assert few.goodput == pytest.approx(choice.goodput)
    assert few.off_goodput == pytest.approx(choice.off_goodput)
    assert _goodput(allowed, few.lengths, costs) == pytest.approx(choice.goodput)
    assert step_ms(few.lengths, costs) == pytest.approx(
        few.draft_ms + costs.verify[few.num_slots] + costs.overhead if few.num_slots else costs.off_ms
    )


@settings(max_examples=100, deadline=None)
@given(cases())
def test_without_draft_costs_no_assignment_at_all_is_better(case):
    survival, costs = case
    n, k = survival.shape
    costs = StepCosts(costs.verify, np.zeros(n + 1), np.zeros(n + 1), 0.0, costs.off_ms)
    best = max(_goodput(survival, lengths, costs) for lengths in itertools.product(range(k + 1), repeat=n))
    assert best_slots(survival, float(n), costs).goodput == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(cases(max_requests=1, max_length=8))
def test_one_request_in_a_loop_is_one_request_in_numpy(case):
    survival, costs = case
    row = best_row(survival[0].tolist(), 1.0, costs, survival.shape[1])
    slots = best_slots(survival, 1.0, costs)
    assert row.goodput == pytest.approx(slots.goodput)
    assert best_uniform(survival[0].tolist(), 1, 1.0, costs, survival.shape[1]).goodput == pytest.approx(row.goodput)


def test_nothing_is_drafted_where_no_draft_is_ever_accepted():
    costs = StepCosts(np.linspace(1, 2, 9), np.linspace(0, 0.1, 3), np.linspace(0, 0.1, 3), 0.0, 1.0)
    assert best_slots(np.full((2, 4), 1e-9), 2.0, costs).lengths == [0, 0]
    assert best_slots(np.zeros((2, 4)), 2.0, costs).lengths == [0, 0]
    assert best_uniform([0.0] * 4, 2, 2.0, costs, 4).lengths == [0, 0]
