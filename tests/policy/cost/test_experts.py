"""Overlaps are learnt from the counts of passes that plans ran, and the price follows them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.core.cost_table import ALL, ExitModel
from faser_trtllm.ops.acceptance import AcceptanceModel
from faser_trtllm.policy.acceptance import AcceptanceEstimator
from faser_trtllm.policy.base import PlanStats
from faser_trtllm.policy.cost.experts import RoutingEstimator
from faser_trtllm.policy.costs import MeasuredCosts
from faser_trtllm.policy.exits import ExitPlanner
from faser_trtllm.policy.stop import draft_stop
from tests.policy.world import ROWS, cost_table

TABLE = Routing(128, 8, 0.15, 0.1)
TRUE = [Routing(128, 8, 0.2), Routing(128, 8, 0.45), Routing(128, 8, 0.4, 0.3)]
PER_EXPERT_MS = 0.15


@pytest.mark.parametrize("true", TRUE)
def test_steps_with_drafts_and_without_tell_both_overlaps(true):
    estimator = RoutingEstimator(TABLE)
    for number in range(60):
        rows = 4 if number % 4 == 0 else 4 * (1 + number % 5)
        estimator.observe(16, rows, 4, float(true.distinct_of(rows, 4)))
    found = estimator.routing
    for shape in ((4, 4), (8, 4), (20, 4), (36, 4), (5, 1), (16, 16), (80, 16)):
        assert found.distinct_of(*shape) == pytest.approx(float(true.distinct_of(*shape)), rel=0.06)


def test_what_is_only_known_of_one_length_is_right_there():
    estimator, true = RoutingEstimator(TABLE), TRUE[2]
    for _ in range(40):
        estimator.observe(16, 20, 4, float(true.distinct_of(20, 4)))
    assert estimator.routing.distinct_of(20, 4) == pytest.approx(float(true.distinct_of(20, 4)), rel=0.02)


def test_counts_that_no_overlap_explains_leave_a_routing_that_can_be():
    for count in (8.0, 128.0):
        estimator = RoutingEstimator(TABLE)
        for _ in range(200):
            estimator.observe(16, 20, 4, count)
        assert TABLE.chance <= estimator.routing.across <= estimator.routing.overlap < 1.0


def test_a_routing_that_stays_is_the_same_value():
    """Arrays that were made with it are good still."""
    estimator = RoutingEstimator(TABLE)
    for _ in range(20):
        estimator.observe(16, 20, 4, 1.001 * float(TABLE.distinct_of(20, 4)))
    assert estimator.routing is TABLE


def mixture_table(routing=TABLE):
    """The dense world's, with a time for each expert on top."""
    table = cost_table()
    verify = replace(table.curves[f"verify@{ALL}"], per_expert_ms=PER_EXPERT_MS)
    return replace(table, curves=dict(table.curves) | {f"verify@{ALL}": verify}, routing=routing)


def run(table, routing, num_requests, drafts, *, error=1.0, steps=16):
    """Return the statistics of steps that read as many experts as `routing` says, on a machine slower by `error`."""
    rows = num_requests * (1 + drafts)
    num_experts = float(routing.distinct_of(rows, num_requests))
    verify_ms = error * steps * table.verify_ms(rows, num_requests, 64, ALL, num_experts)
    draft_ms = steps * drafts * table.draft_step_ms(num_requests, 64)
    sums = {"num_tokens": num_requests, "num_requests": num_requests, "num_rows": rows, "num_experts": num_experts}
    sums |= {"num_verified": num_requests * drafts, "num_drafted": num_requests * drafts, "num_draft_steps": drafts}
    sums |= {"num_draft_calls": int(drafts > 0), "num_draft_rows": num_requests * (drafts > 0)}
    return PlanStats(
        steps, verify_ms + draft_ms + 0.1 * steps, draft_ms, verify_ms, **{k: steps * v for k, v in sums.items()}
    )


def test_slots_cost_what_their_rows_are_expected_to_read():
    table = mixture_table()
    costs = MeasuredCosts(table, 8).step(4, 64)
    dense = MeasuredCosts(cost_table(), 8).step(4, 64)
    rows = np.arange(4, 37)
    assert costs.verify - dense.verify == pytest.approx(PER_EXPERT_MS * TABLE.distinct_of(rows, 4))
    assert costs.off_ms - dense.off_ms == pytest.approx(PER_EXPERT_MS * float(TABLE.distinct_of(4, 4)))
    assert np.array_equal(costs.rows, dense.rows)


def test_next_to_a_prompt_a_row_is_cheaper_than_alone():
    costs = MeasuredCosts(mixture_table(), 8).step(4, 64, 64)
    with_prompts = costs.with_prompts({64: 1.0})
    expected = costs.rows[68:101] + PER_EXPERT_MS * np.array(
        [TABLE.distinct([*rows, 64]) for rows in (spread(n, 4) for n in range(4, 37))]
    )
    whole = np.arange(0, 33, 4)  # of a step's slots, those that all requests have as many of
    assert with_prompts[whole] == pytest.approx(expected[whole])
    assert costs.off_with_prompts({64: 1.0}) == pytest.approx(costs.off_host_ms + with_prompts[0])
    dense = MeasuredCosts(cost_table(), 8).step(4, 64, 64)
    experts_alone = np.diff(costs.verify) - np.diff(dense.verify)
    experts_there = np.diff(with_prompts) - np.diff(dense.with_prompts({64: 1.0}))
    assert (experts_there < 0.8 * experts_alone).all()


def spread(rows, requests):
    return [rows // requests + (i < rows % requests) for i in range(requests)]


@pytest.mark.parametrize("true", TRUE)
def test_the_price_follows_the_counts_of_passes(true):
    table, measured = mixture_table(), MeasuredCosts(mixture_table(), 8)
    for number in range(40):
        measured.observe(run(table, true, 4, (0, 3, 5)[number % 3]), 64)
    known = replace(table, routing=true)
    costs = measured.step(4, 64)
    assert costs.verify[12] == pytest.approx(known.verify_ms(16, 4, 64), rel=0.04)
    assert costs.verify[20] == pytest.approx(known.verify_ms(24, 4, 64), rel=0.04)
    assert measured.slowness == pytest.approx(1.0, abs=0.03)


def test_as_many_rows_of_one_request_as_of_many_have_an_error_of_their_own():
    """The first takes twice what the table says, the second just that."""
    table = mixture_table()
    measured = MeasuredCosts(table, 15)
    for _ in range(60):
        measured.observe(run(table, TABLE, 1, 15, error=2.0), 64)
        measured.observe(run(table, TABLE, 8, 1), 64)
    one, many = measured.step(1, 64), measured.step(8, 64)
    ratio = (one.verify[15] / table.verify_ms(16, 1, 64)) / (many.verify[8] / table.verify_ms(16, 8, 64))
    assert ratio == pytest.approx(2.0, rel=0.1)


def test_the_time_left_at_a_boundary_counts_the_experts_of_the_rows_that_stay():
    table = mixture_table()
    segment = replace(table.curves[f"verify@{ALL}"], per_expert_ms=0.5 * PER_EXPERT_MS)
    table = replace(table, curves=dict(table.curves) | {f"segment:{i}@{ALL}": segment for i in range(2)})
    left = table.remaining_ms_array(1, 36, 4, 64)
    rows = np.arange(4, 37)
    dense = replace(table, routing=None).remaining_ms_array(1, 36, 4, 64)
    assert (left - dense)[4:37] == pytest.approx(0.5 * PER_EXPERT_MS * TABLE.distinct_of(rows, 4))


def test_drafting_goes_on_at_what_the_rows_of_a_place_cost():
    """The mean of all rows of a plan would end it where later rows, which are the cheapest, still pay."""
    costs, estimator = MeasuredCosts(mixture_table(), 8).step(4, 64), AcceptanceEstimator(8)
    experts, lengths = costs.experts_with_prompts({}), [5, 5, 5, 3]
    assert costs.verify - experts == pytest.approx(costs.rows[4:37])
    row_price = draft_stop(lengths, 1.0, costs.verify, costs, estimator, 4, experts).row_price
    dense_ms = (costs.rows[22] - costs.rows[4]) / 18
    assert row_price[0] == pytest.approx(dense_ms + (experts[4] - experts[0]) / 4)
    assert row_price[2] == pytest.approx(dense_ms + (experts[12] - experts[8]) / 4)
    assert (np.diff(row_price[:3]) < 0.0).all()
    beyond_ms = (costs.verify[22] - costs.verify[18]) / 4
    at_four = dense_ms + (experts[15] - experts[12]) / 3
    assert row_price[3] == pytest.approx(0.75 * at_four + 0.25 * beyond_ms)


def test_experts_next_to_prompts_are_averaged_by_their_shares():
    costs = MeasuredCosts(mixture_table(), 8).step(4, 64, 64)
    shares = {32: 0.5, 64: 0.25}
    dense = MeasuredCosts(cost_table(), 8).step(4, 64, 64)
    assert costs.with_prompts(shares) - costs.experts_with_prompts(shares) == pytest.approx(dense.with_prompts(shares))
    assert dense.experts_with_prompts(shares) is None


def with_exit(per_expert_ms, routing=TABLE):
    """Two segments of half the layers each, and an exit between them that is known to pay."""
    table = mixture_table(routing)
    flat = replace(table.curves[f"verify@{ALL}"], ms=(5.0,) * len(ROWS), per_expert_ms=per_expert_ms)
    curves = dict(table.curves) | {f"segment:{i}@{ALL}": flat for i in range(2)}
    return replace(table, curves=curves, exits=(ExitModel(1, 0.0, 0.0, 1.0, 0.0, pays=True),))


def least_worth(table, num_rows, num_requests):
    found = ExitPlanner(table, AcceptanceModel(8), "auto").rule(table, num_rows, num_requests, 64.0, 1.0)
    return None if found is None else found.least[1]


def test_rows_are_dropped_where_experts_are_dropped_with_them():
    assert least_worth(with_exit(0.1), 36, 4) is not None
    assert least_worth(with_exit(0.1), 1152, 128) is None, "all experts are read, whatever is dropped"
    assert least_worth(with_exit(0.0), 36, 4) is None, "no row costs anything"


def test_a_row_must_bring_what_the_experts_of_dropped_rows_cost():
    """A request's last rows read fewer new ones than its first."""
    table = with_exit(0.1)
    all_rows = 0.1 * float(TABLE.distinct_of(36, 4) - TABLE.distinct_of(4, 4)) / 32
    last = 0.1 * float(TABLE.distinct_of(36, 4) - TABLE.distinct_of(32, 4)) / 4
    assert last < least_worth(table, 36, 4) < 0.7 * all_rows
