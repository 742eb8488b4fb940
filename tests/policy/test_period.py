"""A plan is judged by what its steps took and brought; trials and probes pay what they turned out to cost."""

import itertools

import pytest

from faser_trtllm.policy.base import StepView
from faser_trtllm.policy.controller import MIN_LIKELIHOOD, TRIAL_SHARE, TRIAL_STEPS, Controller
from faser_trtllm.policy.fixed import FixedPolicy
from faser_trtllm.policy.judge import Judge
from faser_trtllm.policy.off import OffPolicy
from faser_trtllm.policy.period import Period
from faser_trtllm.policy.price import PLAN_S, PLAN_STEPS, PricePolicy
from faser_trtllm.policy.warm_up import STEPS, S
from tests.policy.world import World, constant, cost_table


def at(now_s, num_generated=0, learning_s=0.0):
    return StepView([], 0, 0, now_s, learning_s=learning_s, num_generated=num_generated)


def steps(period, views, slowness=1.0):
    for view in views[:-1]:
        if not period.is_open:
            period.begin_step(view)
    period.end_steps(views[-1], slowness)


def test_a_period_has_the_tokens_and_the_time_of_its_steps():
    period = Period(2.0, 0.7)  # tokens per ms of the arm in charge, and promised
    steps(period, [at(10.0, 100), at(10.003, 102), at(10.006, 105)], slowness=1.5)
    assert period.tokens == 5
    assert period.expected == pytest.approx(0.7 * 6 / 1.5)
    assert period.lost == pytest.approx(2.0 * 6 - 5)
    assert period.lost_ms == pytest.approx(6 - 2.5)


def test_steps_that_are_not_begun_count_for_nothing():
    """Those with prompts, and pauses."""
    period = Period(2.0, 1.0)
    period.end_steps(at(0.5, 10), 1.0)
    steps(period, [at(0.5, 10), at(0.502, 13)])
    period.end_steps(at(9.0, 99), 1.0)
    steps(period, [at(9.0, 99), at(9.001, 100)])
    assert (period.tokens, period.expected, period.lost) == (4, pytest.approx(3.0), pytest.approx(2.0))


def test_learning_is_not_the_arm_s_fault_but_part_of_a_trial_s_price():
    period = Period(1.0, 1.0)
    steps(period, [at(0.0), at(0.010, 5, learning_s=0.004)])
    assert period.expected == pytest.approx(6.0)
    assert period.lost == pytest.approx(10 - 5)


def test_the_first_steps_after_a_change_are_paid_and_not_judged():
    for step_s, num_cold in ((2 * S, STEPS), (S / 9.5, 10)):
        period = Period(1.0, 1.0, is_change=True)
        step_ms = 1e3 * step_s
        steps(period, [at(step_s * i, 2 * i) for i in range(num_cold + 4)])
        assert (period.tokens, period.expected) == (6, pytest.approx(3 * step_ms))
        assert period.lost == pytest.approx((num_cold + 3) * (step_ms - 2))
        assert period.lost_cold == pytest.approx(num_cold * (step_ms - 2))


def test_a_period_that_ends_cold_lost_all_of_it_cold():
    period = Period(1.0, 1.0, is_change=True)
    steps(period, [at(0.0), at(0.004, 1)])
    assert (period.lost, period.lost_cold) == (pytest.approx(3.0), pytest.approx(3.0))
    assert (period.tokens, period.expected) == (0, 0.0)


def test_a_trial_pays_for_the_cold_caches_behind_it():
    charged = []

    class Charged:
        is_trial = False

        def charge(self, num_lost):
            charged.append(num_lost)

    controller = Charged()
    judge = Judge(controller, None, 3)
    trial = Period(1.0, is_change=True)
    steps(trial, [at(0.0), at(0.02, 15)])
    controller.is_trial = True
    judge.end_plan(10, None, trial)
    assert not judge.is_paid
    assert charged == []
    behind = Period(1.0, is_change=True)
    steps(behind, [at(1.0 + 0.01 * i, 6 * i) for i in range(STEPS + 5)])
    controller.is_trial = False
    judge.end_plan(20, None, behind)
    assert judge.is_paid
    assert charged == [pytest.approx(5.0 + STEPS * 4.0)]
    judge.end_plan(30, None, Period(1.0))
    assert len(charged) == 1


class _Cold(World):
    """Passes take half as long again right after a change between drafting and not, and as ever 10 ms later."""

    changed_s, was_drafting = -1.0, False

    def step(self):
        usual = self.target
        self.target = lambda rows: usual(rows) * (1.0 + 0.5 * max(0.0, 1.0 - 100 * (self.now_s - self.changed_s)))
        super().step()
        self.target = usual

    def _draft(self, plan):
        new, spent_ms = super()._draft(plan)
        if any(new) != self.was_drafting:
            self.changed_s, self.was_drafting = self.now_s, any(new)
        return new, spent_ms


def _short_ms(rows):
    return 0.2 + 0.02 * rows


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.9])
def test_cold_caches_cost_little_where_steps_are_short(acceptance):
    """Steps of a quarter of a millisecond, of which a change makes forty slow."""

    def world(policy):
        return _Cold(policy, 2, constant(acceptance), target=_short_ms, draft=lambda requests: 0.08, noise=0.1)

    best = max(world(policy).run(3000) for policy in (OffPolicy(), *map(FixedPolicy, (1, 2, 4, 6))))
    tried = world(PricePolicy(8, cost_table(_short_ms, lambda requests: 0.08), 32))
    tried.run(4000)
    assert tried.run(12_000) > 0.97 * best


def test_a_rest_of_the_service_is_neither_loss_nor_gain():
    """Behind a probe or in a trial the last request ends, and the next one comes much later."""
    counts = [0, 0]  # probes without rests and with them
    for seed in range(4):
        world = World(PricePolicy(8, cost_table(), 32), 4, constant(0.1), noise=0.05, seed=seed)
        world.run(1500)
        for has_rests in (False, True):
            num_probes = 0
            for _ in range(1000):
                world.step()
                num_probes += world.policy._is_probe
                if has_rests:
                    world.num_held = 0  # the last request ends
                    world.policy.plan(StepView([], 0, 0, world.now_s, num_generated=world.num_tokens))
                    world.now_s += 10.0
            counts[has_rests] += num_probes
    assert 0.5 * counts[0] < counts[1] < 2.0 * counts[0]


def test_a_trial_against_nothing_loses_no_time():
    period = Period(0.0)
    steps(period, [at(0.0), at(1.0)])
    assert period.lost_ms == 0.0


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
        controller.record(4, arm, 8, 8.0)
    return lost / (8 * steps)


@pytest.mark.parametrize("excess", [1.0, 3.0, 10.0])
def test_trials_lose_their_share_whatever_one_costs(excess):
    """Of a rival that is hardly better, and never more than all."""
    assert 0.3 * MIN_LIKELIHOOD * TRIAL_SHARE <= _tokens_lost(excess) <= 1.1 * TRIAL_SHARE


def test_one_hiccup_does_not_end_all_trials():
    controller = Controller({"price": 0.0, "uniform": 0.0})
    predicted = {"price": 1.0, "uniform": 0.98}
    for count in range(2):
        for _ in range(6000):
            arm = controller.choose(4, predicted)
            controller.record(4, arm, 8, 8.0)
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
        world.run(20_000)
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
            policy.plan(StepView(world.requests, 0, 0, now_s, num_generated=world.num_tokens))
            ages.append(0 if policy.controller.is_trial else policy._looks.step - policy._plan_step)
            policy.wants_outcome(policy._drafting)
        assert wanted - 2 <= max(ages) <= wanted + STEPS
