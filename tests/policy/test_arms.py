"""The best arm runs, by what was predicted and what was measured; others are tried at a bounded cost."""

import pytest

from faser_trtllm.policy.arms import EXPLORED_SHARE, Arms

PLAN_MS = 50.0


def live(arms, predicted, truth, num_plans, size=4, entry_ms=None):
    """Run plans -> the share of plans that each arm ran, and the share of the best arm's tokens that was lost."""
    ran, lost, best = dict.fromkeys(predicted, 0), 0.0, max(truth.values())
    for _ in range(num_plans):
        arm, rival = arms.choose(size, predicted, PLAN_MS, entry_ms or {})
        arm = rival or arm
        ran[arm] += 1
        lost += 1.0 - truth[arm] / best
        arms.record(size, arm, 16, PLAN_MS, truth[arm] * PLAN_MS, predicted[arm] * PLAN_MS)
    return {arm: count / num_plans for arm, count in ran.items()}, lost / num_plans


def test_the_best_prediction_runs_where_it_is_right():
    ran, lost = live(Arms(), {"off": 1.0, "price": 1.5}, {"off": 1.0, "price": 1.5}, 2000)
    assert ran["price"] > 0.98
    assert lost <= EXPLORED_SHARE


def test_a_wrong_prediction_is_found_out():
    ran, _ = live(Arms(), {"off": 1.0, "price": 1.2}, {"off": 1.0, "price": 0.8}, 2000)
    assert ran["off"] > 0.95


def test_an_arm_that_is_underestimated_is_found():
    arms = Arms()
    live(arms, {"off": 1.0, "price": 0.9}, {"off": 1.0, "price": 1.3}, 3000)
    ran, _ = live(arms, {"off": 1.0, "price": 0.9}, {"off": 1.0, "price": 1.3}, 1000)
    assert ran["price"] > 0.9


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
def test_trying_costs_no_more_than_its_share(rate):
    _, lost = live(Arms(), {"off": 1.0, "price": rate}, {"off": 1.0, "price": rate}, 5000)
    assert lost <= 1.1 * EXPLORED_SHARE


def test_an_arm_that_is_dear_to_begin_with_is_tried_less_often():
    predicted = {"off": 1.0, "price": 0.95}
    cheap, _ = live(Arms(), predicted, predicted, 5000)
    dear, _ = live(Arms(), predicted, predicted, 5000, entry_ms={"price": 200.0})
    assert 0.0 < dear["price"] < 0.2 * cheap["price"]


def test_batch_sizes_are_learnt_apart():
    arms, predicted = Arms(), {"off": 1.0, "price": 1.2}
    live(arms, predicted, {"off": 1.0, "price": 0.8}, 500, size=32)
    assert arms.choose(32, predicted, PLAN_MS, {})[0] == "off"
    assert arms.choose(4, predicted, PLAN_MS, {})[0] == "price"
