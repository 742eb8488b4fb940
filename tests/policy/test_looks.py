"""Which steps are looked at, and how often."""

import itertools

import pytest

from faser_trtllm.policy.looks import CYCLE, IDLE_CYCLE, MAX_SHARE, MAX_STRETCH, TEST_EVERY, Looks
from faser_trtllm.policy.warm_up import STEPS, S


def asked(looks, kinds, *, all_tests=False, step_s=1.0):
    """-> for each step: whether it is timed, None where it is not looked at at all."""
    timed = []
    for kind in kinds:
        looks.plan(step_s * looks.step)
        timed.append(looks.is_timed if looks.ask(kind, all_tests=all_tests) else None)
    return timed


@pytest.mark.parametrize(("is_speculative", "cycle"), [(False, IDLE_CYCLE), (True, CYCLE)])
def test_one_step_of_a_cycle_is_timed_and_some_more_drafts_are_looked_at(is_speculative, cycle):
    looks = Looks()
    asked(looks, [is_speculative] * cycle)
    timed = asked(looks, [is_speculative] * 12 * cycle)
    first = timed.index(True)
    assert [step for step, is_timed in enumerate(timed) if is_timed] == [first + i * cycle for i in range(12)]
    tests = 12 * CYCLE // TEST_EVERY - 12 * CYCLE // 12  # every twelfth is of both kinds
    assert timed.count(False) == (tests if is_speculative else 0)
    assert looks.step == len(timed) + cycle


@pytest.mark.parametrize("num_warm", range(2 * CYCLE))
def test_no_step_is_timed_behind_one_that_was_looked_at(num_warm):
    kinds = ([True] * (20 * CYCLE + num_warm) + [False] * (3 * IDLE_CYCLE + num_warm)) * 3
    assert all(before is None for before, after in itertools.pairwise(asked(Looks(), kinds)) if after)


@pytest.mark.parametrize(("step_s", "num_cold"), [(2 * S, STEPS), (S / 9.5, 10)])
@pytest.mark.parametrize("kind", [False, True])
def test_the_first_steps_of_a_kind_are_not_timed(kind, step_s, num_cold):
    """Caches are cold: the other model ran, or the draft model makes up for what it has missed."""
    looks = Looks()
    asked(looks, [not kind] * 50, step_s=step_s)
    timed = asked(looks, [kind] * (num_cold + 2), step_s=step_s)
    assert [bool(t) for t in timed] == [*[False] * num_cold, True, False]


def test_no_tested_draft_is_left_out_where_all_are_wanted():
    assert None not in asked(Looks(), [True] * 50, all_tests=True)
    assert asked(Looks(), [False], all_tests=True) == [None]


@pytest.mark.parametrize(("is_speculative", "cycle"), [(False, IDLE_CYCLE), (True, CYCLE)])
def test_where_learning_takes_much_of_the_time_looks_are_rarer(is_speculative, cycle):
    looks = Looks()
    asked(looks, [is_speculative] * cycle)
    now_s = learning_s = 0.0
    untimed = []  # looks at tested drafts only, by call

    def go_on(share, num_cycles=8):
        """Steps between those timed in so many cycles, the pace being told now and then, also within a cycle."""
        nonlocal now_s, learning_s
        timed = []
        for _ in range(num_cycles * 2):
            now_s, learning_s = now_s + 0.2, learning_s + 0.2 * share
            looks.pace(now_s, learning_s)
            timed += asked(looks, [is_speculative] * (cycle // 2))
        untimed.append(timed.count(False))
        return [b - a for a, b in itertools.pairwise(step for step, is_timed in enumerate(timed) if is_timed)]

    assert set(go_on(0.5 * MAX_SHARE)) == {cycle}
    slowed = go_on(2 * MAX_SHARE, num_cycles=80)
    assert slowed[-1] == MAX_STRETCH * cycle
    assert sorted(slowed) == slowed
    assert untimed[1] / 80 < untimed[0] / 8 or not is_speculative
    assert go_on(0.5 * MAX_SHARE, num_cycles=80)[-1] == MAX_STRETCH * cycle
    assert go_on(0.1 * MAX_SHARE, num_cycles=80)[-1] == cycle


@pytest.mark.parametrize("at_most", [0, 1, 3, 100])
def test_what_is_looked_at_does_not_depend_on_which_steps_are_planned(at_most):
    """None behind a step that was looked at is held, so that it is known when that step ended."""
    kinds = ([True] * 50 + [False] * 70) * 4
    looks, num_left, num_held, seen = Looks(), 0, 0, []
    for step, kind in enumerate(kinds):
        if num_left and kinds[step - 1] == kind:
            assert seen[-1] is None, "the step before was looked at"
            num_left -= 1
            num_held += 1
        else:
            looks.plan(float(step))
            num_left = looks.num_held(kind, at_most)
            assert num_left <= at_most
        seen.append(looks.is_timed if looks.ask(kind, all_tests=False) else None)
    assert seen == asked(Looks(), kinds)
    assert num_held <= len(kinds) // 2 if at_most < 2 else num_held > len(kinds) // 2
