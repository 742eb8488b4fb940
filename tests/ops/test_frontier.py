"""Which drafts get a row: the native op is the reference to the bit, buys what pays, and never looks ahead."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.frontier import (
    MAX_MARGIN,
    FrontierRanker,
    FrontierRule,
    frontier_reference,
    num_paying,
    stop_along,
    top_prefixes,
)

NUM_REQUESTS, NUM_DRAFTS = 4, 5


@st.composite
def cases(draw, max_requests=NUM_REQUESTS):
    """A rule, and committed and pending tokens per request."""
    n, k = draw(st.integers(1, max_requests)), draw(st.integers(1, NUM_DRAFTS))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    tie = draw(st.booleans())  # few values, so that survivals are often equal
    margins = rng.integers(0, 3, (n, 16)) if tie else rng.exponential(3.0, (n, 16))
    steps = draw(st.sampled_from([rng.random(n * k), np.repeat(rng.random(n), k), np.zeros(n * k)]))
    rule = FrontierRule(
        (np.ones if tie else rng.random)((NUM_MODES, k)).astype(np.float32),
        (np.zeros if tie else rng.standard_normal)((NUM_MODES, k)).astype(np.float32),
        1.0 + rng.standard_normal((NUM_MODES, k)),
        [row.astype(np.float32) for row in margins],
        rng.integers(0, NUM_MODES, n).tolist(),
        np.zeros(n) if tie else rng.standard_normal(n),
        np.ones(n) if draw(st.booleans()) else rng.uniform(0.5, 4.0, n),
        np.cumsum([rng.random(), *steps]),
        draw(st.floats(0.0, 3.0)),
        draw(st.integers(1, k)),
    )
    return rule, rng.integers(0, 16 - k, n).tolist(), rng.integers(0, k + 1, n).tolist()


def ranked(rule, num_tokens, num_pending):
    ranker = FrontierRanker(NUM_REQUESTS, rule.slope.shape[1])
    ranker.bind(rule)
    return ranker.run(num_tokens, num_pending)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_native_is_the_reference(case):
    assert ranked(*case) == frontier_reference(*case)


def test_the_cases_reach_every_kind_of_decision():
    """Nothing, all and some of what is pending; one request and several; with the property above, not a tautology."""
    seen = set()

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(cases())
    def look(case):
        total, run = sum(case[2]), sum(ranked(*case))
        if total > 1:
            seen.add((len(case[2]) == 1, "none" if run == 0 else "all" if run == total else "some"))

    look()
    assert seen == set(itertools.product((True, False), ("none", "all", "some")))


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(0, NUM_REQUESTS - 1), st.integers(0, NUM_DRAFTS - 1), st.floats(-4.0, 40.0))
def test_whether_a_slot_runs_does_not_depend_on_later_drafts_of_its_request(case, i, j, margin):
    """The exactness rule: change what follows slot j of request i, and the slots up to j stay as they were."""
    rule, num_tokens, num_pending = case
    i %= len(num_pending)
    before = ranked(*case)
    rule.draft_margins[i][num_tokens[i] + j + 1 :] = margin
    assert min(before[i], j + 1) == min(ranked(*case)[i], j + 1)


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, NUM_REQUESTS - 1))
def test_nor_on_whether_more_is_drafted(case, i):
    """Nor does the number of drafts behind a slot count, where all that were pending run."""
    rule, num_tokens, num_pending = case
    i %= len(num_pending)
    before = ranked(*case)
    if 0 < num_pending[i] < rule.slope.shape[1]:
        more = list(num_pending)
        more[i] += 1
        assert min(ranked(rule, num_tokens, more)[i], num_pending[i]) == before[i]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), max_size=8), st.floats(0.0, 10.0), st.integers(0, 1 << 32))
def test_the_number_that_pays_is_the_argmax(survivals, price, seed):
    survivals.sort(reverse=True)
    verify_ms = np.cumsum(np.random.default_rng(seed).random(len(survivals) + 1))
    worth = [sum(survivals[:m]) - price * verify_ms[m] for m in range(len(survivals) + 1)]
    assert worth[num_paying(survivals, verify_ms, price)] == pytest.approx(max(worth))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.floats(0.0, 1.0), max_size=5), min_size=1, max_size=4), st.integers(0, 25))
def test_top_prefixes_keep_the_budget_and_the_best(worth, budget):
    for row in worth:
        row.sort(reverse=True)
    lengths = top_prefixes(worth, budget)
    assert sum(lengths) == min(budget, sum(map(len, worth)))
    kept = [one for row, length in zip(worth, lengths, strict=True) for one in row[:length]]
    left = [one for row, length in zip(worth, lengths, strict=True) for one in row[length:]]
    assert not kept or not left or min(kept) >= max(left)
    assert all(a <= b for a, b in zip(lengths, top_prefixes(worth, budget + 1), strict=True))


def test_one_request_goes_on_while_what_lies_ahead_pays():
    """A row costs 0.5; at a price of 1 the second slot alone does not pay, with the third on the same stair it does."""
    verify_ms = [1.0, 1.5, 2.0, 2.0, 2.5]
    assert stop_along([0.8, 0.4, 0.3, 0.1], [0.8, 0.5, 0.5], verify_ms, 1.0) == 3
    assert stop_along([0.8, 0.4, 0.3, 0.1], [0.8, 0.5], verify_ms, 1.0) == 1
    assert stop_along([0.4], [0.8, 0.2], [1.0, 1.5, 2.0], 1.0) == 0


def _rule(n=2, k=3):
    margins = [np.ones(16, np.float32) for _ in range(n)]
    zeros, prior = np.zeros((NUM_MODES, k), np.float32), np.zeros((NUM_MODES, k))
    return FrontierRule(
        zeros, zeros, prior, margins, [0] * n, np.zeros(n), np.ones(n), [1.0] * (n * k + 1), price=1.0, num_ahead=k
    )


def test_margins_count_up_to_a_limit():
    """Beyond it two drafts are alike, so the earlier request's runs: here the second one's is surer below the limit."""
    rule = _rule()
    rule = replace(rule, slope=np.ones((NUM_MODES, 3), np.float32), verify_ms=[0, 0.5, 2, 3, 4, 5, 6])
    for margin, lengths in ((MAX_MARGIN / 2, [0, 1]), (2 * MAX_MARGIN, [1, 0])):
        rule.draft_margins[0][:], rule.draft_margins[1][:] = margin, 2 * margin
        assert ranked(rule, [4, 4], [1, 1]) == frontier_reference(rule, [4, 4], [1, 1]) == lengths


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_ahead": 4}, "num_ahead is 4, from 1 to max_draft_len 3 go"),
        ({"num_ahead": 0}, "num_ahead is 0"),
        ({"verify_ms": [1.0] * 6}, "verify_ms has 6 costs, 2 requests need 7"),
        ({"draft_margins": []}, "margins of 0 requests"),
        ({"draft_margins": _rule(n=5).draft_margins}, "margins of 5 requests, from 1 to max_batch_size 4 go"),
    ],
)
def test_rules_that_do_not_fit_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ranked(replace(_rule(), **change), [4, 4], [1, 1])


@pytest.mark.parametrize(
    ("num_tokens", "num_pending", "modes"),
    [([4, 4], [1, 4], [0, 0]), ([4, 4], [-1, 1], [0, 0]), ([4, -1], [1, 1], [0, 0]), ([4, 4], [1, 1], [0, NUM_MODES])],
)
def test_counts_and_modes_that_index_memory_are_checked(num_tokens, num_pending, modes):
    with pytest.raises(InvalidArgumentError, match="an argument is out of range"):
        ranked(replace(_rule(), modes=modes), num_tokens, num_pending)


def test_a_rule_holds_for_many_steps_and_the_next_one_replaces_all_of_it():
    ranker = FrontierRanker(4, 3)
    small = replace(_rule(), verify_ms=np.arange(7.0), price=0.3)
    large = replace(_rule(n=4), price=0.0)
    for rule, pending in ((large, [3] * 4), (small, [3, 2]), (large, [1] * 4), (small, [0, 3])):
        ranker.bind(rule)
        for num_tokens in (4, 5):
            tokens = [num_tokens] * len(pending)
            assert ranker.run(tokens, pending) == frontier_reference(rule, tokens, pending)
