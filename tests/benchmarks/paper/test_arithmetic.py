"""Systems by arithmetic: tokens per step are those of the simulation, and bounds are bounds."""

import pytest

from benchmarks.paper.arithmetic import baselines, streams
from benchmarks.paper.case import Setting, run_case
from benchmarks.paper.expected import caught_by, levels, tokens_per_step
from tests.support.effort import ONLY_ALL

SMALL = Setting("h100", "llama-3.1-8b", "llama-3.2-1b", 4)


def test_tokens_per_step_are_those_of_a_simulation_with_the_same_length():
    found = run_case("static", SMALL, "fixed:3", "fixed:3")
    assert 1.0 + 3 * found.accepted == pytest.approx(tokens_per_step(0.7, (1, 1, 1)), rel=0.04)


def test_candidates_that_catch_every_failure_bring_the_whole_depth_and_none_bring_one_token():
    assert tokens_per_step(0.7, ()) == 1.0
    assert tokens_per_step(0.7, (3, 3, 3), caught=1.0) == pytest.approx(4.0, rel=0.02)


def test_a_deeper_chain_and_a_wider_tree_bring_more():
    chains = [tokens_per_step(0.7, (1,) * depth) for depth in range(6)]
    assert chains == sorted(chains)
    trees = [tokens_per_step(0.7, (width, 1), 0.45) for width in (1, 2, 3)]
    assert trees == sorted(trees)
    assert trees[0] == tokens_per_step(0.7, (1, 1))


def test_one_candidate_catches_nothing_and_nine_what_three_twice_do():
    assert caught_by(1, 0.45) == 0.0
    assert caught_by(3, 0.45) == pytest.approx(0.45)
    assert caught_by(9, 0.45) == pytest.approx(1.0 - 0.55**2)


def test_a_tree_has_a_chain_behind_each_candidate():
    assert levels((1, 1, 3, 1, 1)) == (1, 1, 3, 3, 3)


@pytest.mark.parametrize("load", [16, 256])
def test_time_slices_bring_nothing_over_serial_steps_and_waits_cost(load):
    (answer,) = streams([Setting("h200", "llama-3.1-8b", "llama-3.2-1b", load, acceptance=0.85)])
    assert answer.ratios["serial"] == 1.0
    assert answer.ratios["time slices"] < 1.0
    assert answer.ratios["priority, 10 us per kernel"] <= answer.ratios["priority, ideal"]
    assert answer.draft_sms in (24, 32, 48, 64)


@ONLY_ALL
def test_trees_pay_at_few_requests_and_chains_at_many():
    few, many = (answer.ratios for answer in baselines([SMALL, Setting("h100", SMALL.target, SMALL.draft, 256)]))
    assert few["best tree"] > few["best chain"] > 1.0
    assert many["best chain"] > many["best tree"] > many["SpecInfer-like tree"]
    assert few["best tree, sampled"] > few["best tree"]
