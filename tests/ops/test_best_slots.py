"""Which slots pay: the native op is the reference to the bit, and no other choice of slots is better."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.acceptance import MAX_MARGIN
from faser_trtllm.ops.best_slots import SlotCosts, VerificationRule, best_slots
from lab.reference.best_slots import best_slots_reference, verify_lengths_reference
from tests.ops.acceptance_models import model_and_slots
from tests.support.columns import columns
from tests.support.effort import examples

NUM_REQUESTS, NUM_DRAFTS = 4, 5


def random_costs(draw, rng, n, k, *, drafts=True):
    stairs = draw(st.sampled_from([rng.random(n * k), np.repeat(rng.random(n), k), np.zeros(n * k)]))
    draft_ms = None
    if drafts and draw(st.booleans()):
        draft_ms = tuple(np.cumsum([0.0, *rng.random(n)]) for _ in range(2))
    price = draw(st.sampled_from([0.0, 0.3, 1.0, 3.0]))
    return SlotCosts(
        np.cumsum([0.1 + rng.random(), *stairs]),
        draft_ms,
        fixed_ms=draw(st.floats(0.0, 1.0)) if price == 0.0 else 0.0,
        base_tokens=float(n),
        price=price,
        multiple=draw(st.sampled_from([1, 1, n])),
    )


@st.composite
def plans(draw, max_requests=NUM_REQUESTS, max_drafts=NUM_DRAFTS):
    """Survivals, limits and costs; with few distinct acceptances, so that survivals are often equal."""
    n, k = draw(st.integers(1, max_requests)), draw(st.integers(1, max_drafts))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    p = rng.choice([0.5, 0.9], (n, k)) if draw(st.booleans()) else rng.random((n, k))
    limits = np.full(n, k) if draw(st.booleans()) else rng.integers(0, k + 1, n)
    return np.cumprod(p, 1), limits.astype(np.int32), random_costs(draw, rng, n, k)


@settings(max_examples=examples(300))
@given(plans())
def test_native_is_the_reference(plan):
    assert best_slots(*plan) == best_slots_reference(*plan)


def score(survival, lengths, costs):
    """Tokens per ms, or tokens - price * ms, by the definition."""
    slots, n = sum(lengths), len(lengths)
    tokens = costs.base_tokens + sum(survival[i, :length].sum() for i, length in enumerate(lengths))
    ms = costs.verify_ms[slots] + (costs.fixed_ms if slots else 0.0)
    if costs.draft_ms is not None:
        for place in range(max(lengths)):
            ms += costs.draft_ms[place > 0][sum(lengths[i] > place for i in range(n))]
    return tokens - costs.price * ms if costs.price else tokens / ms


@settings(max_examples=examples(150))
@given(plans(max_requests=3, max_drafts=3))
def test_no_other_lengths_are_better_where_drafting_is_paid(plan):
    survival, limits, costs = plan
    costs = SlotCosts(costs.verify_ms, None, fixed_ms=costs.fixed_ms, base_tokens=costs.base_tokens, price=costs.price)
    found = best_slots(survival, limits, costs)
    every = itertools.product(*(range(limit + 1) for limit in limits.tolist()))
    allowed = [lengths for lengths in every if costs.price or any(lengths)]
    if allowed:
        assert found.score == pytest.approx(max(score(survival, lengths, costs) for lengths in allowed))
        assert score(survival, found.lengths, costs) == pytest.approx(found.score)
    else:
        assert (sum(found.lengths), found.score) == (0, 0.0)


@settings(max_examples=examples(150))
@given(plans())
def test_no_uniform_length_is_better(plan):
    survival, limits, costs = plan
    costs = SlotCosts(
        costs.verify_ms, costs.draft_ms, fixed_ms=costs.fixed_ms, base_tokens=costs.base_tokens, price=costs.price
    )
    found = best_slots(survival, limits, costs)
    for longest in range(1, survival.shape[1] + 1):
        lengths = np.minimum(longest, limits).tolist()
        if any(lengths):
            assert found.score >= score(survival, lengths, costs) - 1e-9


@settings(max_examples=examples(100))
@given(plans())
def test_drafting_is_paid_by_step(plan):
    survival, limits, costs = plan
    found = best_slots(survival, limits, costs)
    if any(found.lengths):
        assert score(survival, found.lengths, costs) == pytest.approx(found.score)


def test_multiples_of_equal_rows_are_uniform_lengths():
    survival = np.tile(np.cumprod([0.9, 0.8, 0.5, 0.2]), (3, 1))
    costs = SlotCosts(np.linspace(1.0, 2.0, 13), base_tokens=3.0, multiple=3)
    uniform = {k: score(survival, [k] * 3, costs) for k in range(1, 5)}
    found = best_slots(survival, np.full(3, 4, np.int32), costs)
    assert found.lengths == [max(uniform, key=uniform.get)] * 3


def test_limits_and_numbers_that_index_memory_are_checked():
    survival, costs = np.ones((2, 3)), SlotCosts(np.ones(7))
    with pytest.raises(InvalidArgumentError, match="an argument is out of range"):
        best_slots(survival, np.array([3, 4], np.int32), costs)


@st.composite
def pending_drafts(draw):
    n, k = draw(st.integers(1, NUM_REQUESTS)), draw(st.integers(1, NUM_DRAFTS))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    model, slots, margins = model_and_slots(rng, n, k, tie=draw(st.booleans()))
    costs = random_costs(draw, rng, n, k, drafts=False)
    costs = SlotCosts(costs.verify_ms, price=costs.price or 0.5)
    counts = columns(rng.permutation(n), rng.integers(0, 16 - k, n), rng.integers(0, k + 1, n))
    return VerificationRule(model, costs), slots, margins, counts


@settings(max_examples=examples(300))
@given(pending_drafts())
def test_native_verification_lengths_are_the_reference(case):
    rule, slots, _, counts = case
    lengths = rule.lengths(slots.array, *counts).tolist()
    assert lengths == verify_lengths_reference(rule, slots.array, *counts)
    assert all(0 <= length <= pending for length, pending in zip(lengths, counts[2], strict=True))


def test_the_cases_reach_every_kind_of_decision():
    """Nothing, all and some of what is pending; one request and several; with the property above, not a tautology."""
    seen = set()

    @settings(max_examples=examples(600), database=None, derandomize=True)
    @given(pending_drafts())
    def look(case):
        rule, slots, _, counts = case
        total, run = sum(counts[2]), sum(rule.lengths(slots.array, *counts))
        if total > 1:
            seen.add((len(counts[2]) == 1, "none" if run == 0 else "all" if run == total else "some"))

    look()
    assert seen == set(itertools.product((True, False), ("none", "all", "some")))


def test_margins_count_up_to_a_limit():
    """Beyond it two drafts are alike, so the earlier request's runs: here the second one's is surer below the limit."""
    model, slots, margins = model_and_slots(np.random.default_rng(0), 2, 3, tie=True)
    slots.array["mode"] = 0
    rule = VerificationRule(model, SlotCosts(np.array([0, 0.5, 2, 3, 4, 5, 6.0]), price=1.0))
    for margin, lengths in ((MAX_MARGIN / 2, [0, 1]), (2 * MAX_MARGIN, [1, 0])):
        margins[0], margins[1] = margin, 2 * margin
        assert rule.lengths(slots.array, *columns([0, 1], [4, 4], [1, 1])).tolist() == lengths


def test_a_later_draft_may_carry_an_earlier_one_over_a_stair():
    """The second slot lies on the stair of the first: together they pay, the first alone does not."""
    model, slots, margins = model_and_slots(np.random.default_rng(0), 1, 2, tie=True)
    rule = VerificationRule(model, SlotCosts(np.array([1.0, 2.2, 2.2]), price=1.0))
    margins[0] = 20.0
    assert rule.lengths(slots.array, *columns([0], [4], [2])).tolist() == [2]
    assert rule.lengths(slots.array, *columns([0], [4], [1])).tolist() == [0]


@pytest.mark.parametrize("counts", [([0], [4], [4]), ([0], [4], [-1]), ([0], [-1], [1])])
def test_counts_that_index_memory_are_checked(counts):
    model, slots, _ = model_and_slots(np.random.default_rng(0), 1, 3)
    rule = VerificationRule(model, SlotCosts(np.ones(4), price=1.0))
    with pytest.raises(InvalidArgumentError, match="an argument is out of range"):
        rule.lengths(slots.array, *columns(*counts))
