"""A plan that says so stands for several steps; whoever comes or goes ends that."""

import itertools
import random

import pytest

from faser_trtllm.config import CapacitySchedulerPolicy
from faser_trtllm.core.decision import Decision
from faser_trtllm.policy.static import FixedPolicy
from tests.scheduler.fake_pass import Bench


class _Counting:
    """One draft each; plan() holds for num_held more steps."""

    name = "counting"

    def __init__(self, num_held):
        self.num_held = num_held
        self.views = []
        self.stats = []

    def plan(self, view):
        self.views.append(view)
        return Decision([1] * len(view.decoding), num_held=self.num_held)

    def observe(self, stats):
        self.stats.append(stats)


def _running(num_held, num_requests=2, **limits):
    """Return a bench whose requests decode, and its policy; nothing is held yet."""
    policy = _Counting(num_held)
    bench = Bench(drafts=1, policy=policy, num_blocks=200, **limits)
    for _ in range(num_requests):
        bench.add(3, max_tokens=40)
    bench.step()
    policy.views.clear()
    return bench, policy


@pytest.mark.parametrize("num_held", [0, 1, 4])
def test_a_plan_is_asked_for_again_when_its_steps_are_over(num_held):
    bench, policy = _running(num_held)
    for step in range(1, 11):
        _, rows, _ = bench.step()
        assert [drafts for _, _, drafts in rows] == [1, 1]
        assert len(policy.views) == -(-step // (1 + num_held))


@pytest.mark.parametrize("change", ["add", "cancel", "end"])
def test_whoever_comes_or_goes_ends_what_was_held(change):
    bench, policy = _running(num_held=1000)
    if change == "end":
        bench.scheduler.cancel("0")
        bench.add(3, max_tokens=6)
        bench.step()
        policy.views.clear()
    for _ in range(3):
        bench.step()
    assert len(policy.views) == 1
    if change == "add":
        bench.add(3)
    elif change == "cancel":
        bench.scheduler.cancel("1")
    else:
        while len(bench.scheduler.running) == 2:
            bench.step()
        assert len(policy.views) == 1
    bench.step()
    assert len(policy.views) == 2
    assert len(policy.views[1].decoding) == (2 if change == "add" else 1)
    assert policy.views[1].num_joining == (1 if change == "add" else 0)


def test_whoever_is_late_ends_what_was_held_at_once():
    bench, policy = _running(num_held=1000, num_requests=1)
    bench.add(3, max_tokens=40, deadline_s=1.0)
    for _ in range(5):
        bench.step()
    assert len(policy.views) == 2, "the newcomer joins, then a plan for both is held"
    bench.clock.advance(2.0)
    plan, _, _ = bench.step()
    assert [request.request_id for request in plan.finished] == ["1"]
    assert len(policy.views) == 3


def test_where_blocks_may_run_short_every_step_is_planned():
    limits = {"capacity_policy": CapacitySchedulerPolicy.MAX_UTILIZATION, "max_seq_len": 64}
    policy = _Counting(1000)
    bench = Bench(drafts=1, policy=policy, num_blocks=4, max_batch_size=1, **limits)
    bench.add(3, max_tokens=12)
    counts = []
    while bench.scheduler.has_work():
        bench.step()
        counts.append(len(policy.views))
    assert counts[-1] == counts[-2] + 1 == counts[-3] + 2, "two blocks are left, of which a step may take three"


@pytest.mark.parametrize("seed", range(4))
def test_a_held_plan_schedules_as_one_that_is_made_anew(seed):
    policy = _Held(3)
    benches = [Bench(drafts=3, policy=p, max_batch_size=4, num_blocks=200) for p in (policy, _Anew(3))]
    held, anew = (bench.scheduler for bench in benches)
    rng = random.Random(seed)
    for step in itertools.count():
        if step < 40 and rng.random() < 0.2:
            length, tokens, first = rng.randint(1, 9), rng.randint(1, 30), rng.randint(0, 49)
            for bench in benches:
                bench.add(length, max_tokens=tokens, first=first)
        if rng.random() < 0.05 and held.running:
            name = rng.choice(held.running).request_id
            for scheduler in (held, anew):
                scheduler.cancel(name)
        if step >= 40 and not held.has_work():
            break
        if not held.has_work():
            continue
        accept, carry, trim = rng.randint(0, 3), rng.random() < 0.5, rng.randint(0, 3)
        (plan_, rows, outputs), (other, other_rows, other_outputs) = (
            bench.step(accept, carry, trim=trim) for bench in benches
        )
        assert rows == other_rows
        assert plan_.scheduled.max_verified.tolist() == other.scheduled.max_verified.tolist()
        assert [r.request_id for r in plan_.view.decoding] == [r.request_id for r in other.view.decoding]
        assert [(o.request.request_id, o.new_token_ids) for o in outputs] == [
            (o.request.request_id, o.new_token_ids) for o in other_outputs
        ]
        held.check_integrity()
    assert policy.num_plans < step


class _Held(FixedPolicy):
    num_plans = 0

    def plan(self, view):
        self.num_plans += 1
        return super().plan(view)


class _Anew(FixedPolicy):
    def plan(self, view):
        return Decision(super().plan(view).lengths)


def test_the_policy_is_told_of_all_steps_of_its_last_plan():
    bench, policy = _running(num_held=2)
    policy.stats.clear()
    for step in range(1, 13):
        bench.step(accept=step % 2)
        bench.clock.advance(0.5)
    told = policy.stats[-2:]
    assert [stats.num_steps for stats in told] == [3, 3]
    for stats in told:
        assert stats.ms == pytest.approx(3 * 500.0)
        assert (stats.num_requests, stats.num_rows, stats.num_verified) == (6, 12, 6)
        assert stats.num_tokens == stats.num_requests + stats.num_accepted


def test_time_without_work_is_no_steps():
    bench, policy = _running(num_held=0, num_requests=1)
    while bench.scheduler.has_work():
        bench.step()
        bench.clock.advance(0.5)
    policy.stats.clear()
    bench.clock.advance(100.0)
    bench.add(3, max_tokens=10)
    for _ in range(8):
        bench.step()
        bench.clock.advance(0.5)
    assert policy.stats
    assert all(stats.ms == pytest.approx(500.0 * stats.num_steps) for stats in policy.stats)


def test_steps_with_prompts_and_the_first_ones_of_drafting_are_not_told():
    bench, policy = _running(num_held=0, num_requests=1)
    policy.stats.clear()
    bench.add(3, max_tokens=40, first=9)
    bench.step()  # closes the step before, runs the prompt
    policy.stats.clear()
    bench.step()
    assert policy.stats == []
