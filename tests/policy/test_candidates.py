"""The best candidate runs, by what was predicted and what was measured; others are tried at a bounded cost."""

import pytest

from faser_trtllm.policy.candidates import EXPLORED_SHARE, Candidates

PLAN_MS = 50.0


def live(candidates, predicted, truth, num_plans, size=4, entry_ms=None):
    """Run plans -> the share of plans that each candidate ran, and the share of the best one's tokens that was lost."""
    ran, lost, best = dict.fromkeys(predicted, 0), 0.0, max(truth.values())
    for _ in range(num_plans):
        candidate, rival = candidates.choose(size, predicted, PLAN_MS, entry_ms or {})
        candidate = rival or candidate
        ran[candidate] += 1
        lost += 1.0 - truth[candidate] / best
        candidates.record(size, candidate, 16, PLAN_MS, truth[candidate] * PLAN_MS, predicted[candidate] * PLAN_MS)
    return {candidate: count / num_plans for candidate, count in ran.items()}, lost / num_plans


def test_the_best_prediction_runs_where_it_is_right():
    ran, lost = live(Candidates(), {"off": 1.0, "price": 1.5}, {"off": 1.0, "price": 1.5}, 2000)
    assert ran["price"] > 0.98
    assert lost <= EXPLORED_SHARE


def test_a_wrong_prediction_is_found_out():
    ran, _ = live(Candidates(), {"off": 1.0, "price": 1.2}, {"off": 1.0, "price": 0.8}, 2000)
    assert ran["off"] > 0.95


def test_an_arm_that_is_underestimated_is_found():
    candidates = Candidates()
    live(candidates, {"off": 1.0, "price": 0.9}, {"off": 1.0, "price": 1.3}, 3000)
    ran, _ = live(candidates, {"off": 1.0, "price": 0.9}, {"off": 1.0, "price": 1.3}, 1000)
    assert ran["price"] > 0.9


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.95])
def test_trying_costs_no_more_than_its_share(rate):
    _, lost = live(Candidates(), {"off": 1.0, "price": rate}, {"off": 1.0, "price": rate}, 5000)
    assert lost <= 1.1 * EXPLORED_SHARE


def test_an_arm_that_is_dear_to_begin_with_is_tried_less_often():
    predicted = {"off": 1.0, "price": 0.95}
    cheap, _ = live(Candidates(), predicted, predicted, 5000)
    dear, _ = live(Candidates(), predicted, predicted, 5000, entry_ms={"price": PLAN_MS})
    assert 0.0 < dear["price"] < 0.5 * cheap["price"]


def test_what_beginning_costs_is_taken_to_be_a_trials_time_at_most():
    """Who believes that it costs minutes would never find out that it does not."""
    predicted = {"off": 1.0, "price": 0.95}
    dear, _ = live(Candidates(), predicted, predicted, 5000, entry_ms={"price": PLAN_MS})
    dearer, _ = live(Candidates(), predicted, predicted, 5000, entry_ms={"price": 1000 * PLAN_MS})
    assert dearer["price"] == dear["price"]


def test_a_free_trial_needs_a_chance_to_be_the_best():
    """At once where the table's error leaves one, and else when the time is saved up."""
    for table_error, is_tried in ((0.1, False), (0.5, True)):
        candidates, predicted = Candidates(table_error), {"off": 0.6, "price": 1.0}
        candidates.record(4, "price", 16, PLAN_MS, PLAN_MS, PLAN_MS)
        assert (candidates.choose(4, predicted, PLAN_MS, {})[1] == "off") == is_tried
    ran, _ = live(Candidates(0.1), {"off": 0.6, "price": 1.0}, {"off": 1.3, "price": 1.0}, 3000)
    assert ran["off"] > 0.5


def test_a_probe_runs_and_is_never_in_charge():
    candidates, predicted = Candidates(), {"off": 0.5, "price": 1.0, "probe": 0.98}
    chosen = []
    for _ in range(2000):
        candidate, rival = candidates.choose(4, predicted, PLAN_MS, {}, "probe")
        chosen.append((candidate, rival))
        brought = 2.0 if rival == "probe" else 1.0
        candidates.record(
            4, rival or candidate, 16, PLAN_MS, brought * PLAN_MS, predicted[rival or candidate] * PLAN_MS
        )
    assert {candidate for candidate, _ in chosen} == {"price"}
    assert ("price", "probe") in chosen


def test_batch_sizes_are_learnt_apart():
    candidates, predicted = Candidates(), {"off": 1.0, "price": 1.2}
    live(candidates, predicted, {"off": 1.0, "price": 0.8}, 500, size=32)
    assert candidates.choose(32, predicted, PLAN_MS, {})[0] == "off"
    assert candidates.choose(4, predicted, PLAN_MS, {})[0] == "price"
