"""Trials and probes are charged what they turned out to cost, so that they keep to their share of the time."""

import itertools

import pytest

from faser_trtllm.policy.base import StepView
from faser_trtllm.policy.controller import TRIAL_SHARE, TRIAL_STEPS, Controller
from faser_trtllm.policy.price import PLAN_S, PLAN_STEPS, PricePolicy
from faser_trtllm.policy.trial import Trial
from tests.policy.world import World, constant, cost_table


def test_a_trial_loses_what_the_other_arm_would_have_brought():
    trial = Trial(2.0)  # tokens per ms
    for now_s in (10.0, 10.003, 10.006):
        trial.step(now_s, has_prompts=False)
    trial.add(5)
    assert trial.lost == pytest.approx(2.0 * 6 - 5)
    assert trial.lost_ms == pytest.approx(6 - 2.5)


def test_steps_with_prompts_count_for_nothing():
    trial = Trial(2.0)
    for now_s, has_prompts in ((0.0, True), (0.5, False), (0.502, True), (1.0, True), (2.0, False)):
        trial.step(now_s, has_prompts=has_prompts)
    assert trial.lost == pytest.approx(2.0 * 2)


def test_a_pause_is_nobody_s():
    trial = Trial(2.0)
    trial.step(0.0, has_prompts=False)
    trial.pause()
    trial.step(9.0, has_prompts=False)
    trial.step(9.001, has_prompts=False)
    assert trial.lost == pytest.approx(2.0)


def test_a_rest_of_the_service_is_no_loss():
    """Behind a probe or in a trial the last request ends, and the next one comes much later."""
    world = World(PricePolicy(8, cost_table(), 32), 4, constant(0.1), noise=0.05)
    world.run(1500)
    counts = []
    for _ in range(2):
        begun = len(world.drafted_lengths)
        for _ in range(1000):
            world.step()
            if counts:
                world.policy.plan(StepView([], 0, 0, world.now_s))
                world.now_s += 10.0
        counts.append(sum(any(lengths) for lengths in world.drafted_lengths[begun:]))
    assert counts[1] > 0.3 * counts[0] > 0


def test_a_trial_against_nothing_loses_no_time():
    trial = Trial(0.0)
    trial.step(0.0, has_prompts=False)
    trial.step(1.0, has_prompts=False)
    assert trial.lost_ms == 0.0


def _tokens_lost(excess, steps=40_000):
    """Share of the tokens that trials lose, each so many times what it was expected to."""
    controller, lost, left = Controller({"price": 0.0, "uniform": 0.0}), 0.0, 0
    predicted = {"price": 1.0, "uniform": 0.9}
    for _ in range(steps):
        if left == 0:
            if controller.is_trial:
                controller.charge(excess * 0.1 * 8 * TRIAL_STEPS)
                lost += excess * 0.1 * 8 * TRIAL_STEPS
            arm = controller.choose(4, predicted)
            left = TRIAL_STEPS if controller.is_trial else 1
        left -= 1
        controller.record(4, arm, 8, predicted[arm], 8.0 / predicted[arm])
    return lost / (8 * steps)


@pytest.mark.parametrize("excess", [1.0, 3.0, 10.0])
def test_trials_lose_their_share_whatever_one_costs(excess):
    assert 0.3 * TRIAL_SHARE <= _tokens_lost(excess) <= 1.1 * TRIAL_SHARE


def test_one_hiccup_does_not_end_all_trials():
    controller = Controller({"price": 0.0, "uniform": 0.0})
    predicted = {"price": 1.0, "uniform": 0.98}
    for count in range(2):
        for _ in range(6000):
            arm = controller.choose(4, predicted)
            controller.record(4, arm, 8, predicted[arm], 8.0 / predicted[arm])
            if controller.is_trial:
                break
        assert controller.is_trial, f"no trial after {count}"
        controller.charge(1e9)


class _Interrupted(World):
    """Whatever is a change from drafting to not, or back, takes the machine so much longer."""

    change_ms = 0.0
    was_drafting = None

    def _draft(self, plan):
        is_drafting = any(plan.lengths)
        if self.was_drafting not in (None, is_drafting):
            self.now_s += 1e-3 * self.change_ms
        self.was_drafting = is_drafting
        return super()._draft(plan)


@pytest.mark.parametrize("acceptance", [0.1, 0.5])
def test_dear_changes_are_made_rarely(acceptance):
    changes = []
    for change_ms in (0.0, 20.0):
        world = _Interrupted(PricePolicy(8, cost_table(), 32), 4, constant(acceptance), noise=0.05)
        world.change_ms = change_ms
        world.run(1500)
        begun = len(world.drafted_lengths)
        world.run(6000)
        drafting = [any(lengths) for lengths in world.drafted_lengths[begun:]]
        changes.append(sum(a != b for a, b in itertools.pairwise(drafting)))
    assert changes[0] > 2 * changes[1]
    assert changes[1] > 0, "it never looks again"


def test_a_plan_holds_for_its_steps_and_for_its_time():
    for step_s, wanted in ((2 * PLAN_S / PLAN_STEPS, PLAN_STEPS), (0.1 * PLAN_S / PLAN_STEPS, 10 * PLAN_STEPS)):
        policy = PricePolicy(8, cost_table(), 32)
        world = World(policy, 4, constant(0.9), noise=0.05)
        world.run(2000)
        ages, now_s = [], world.now_s
        for _ in range(3 * wanted):
            now_s += step_s
            policy.plan(StepView(world.requests, 0, 0, now_s))
            ages.append(0 if policy.controller.is_trial else policy._plan_age)
        assert max(ages) == pytest.approx(wanted - 1, abs=1)
