"""Which steps are looked at, and that their weights stand for all of them."""

import pytest

from faser_trtllm.policy.looks import CYCLE, IDLE_CYCLE, LOOKS, MAX_SHARE, MAX_STRETCH, TEST_EVERY, Looks


def asked(looks, kinds, *, all_steps=False):
    """-> for each step: its weight, None where it is not looked at."""
    return [looks.weight if looks.ask(kind, all_steps=all_steps) else None for kind in kinds]


@pytest.mark.parametrize(("is_speculative", "cycle"), [(False, IDLE_CYCLE), (True, CYCLE)])
def test_weights_add_up_to_the_steps(is_speculative, cycle):
    looks = Looks()
    asked(looks, [is_speculative] * (1 if not is_speculative else cycle))  # the first one without drafts is left out
    weights = asked(looks, [is_speculative] * 10 * cycle)
    assert sum(w for w in weights if w is not None) == 10 * cycle
    assert sum(1 for w in weights if w) == 10 * LOOKS
    assert sum(1 for w in weights if w == 0) == (10 * (CYCLE // TEST_EVERY - 1) if is_speculative else 0)
    assert looks.step == len(weights) + (cycle if is_speculative else 1)


def test_looks_come_in_a_row():
    weights = asked(Looks(), [True] * 20 * CYCLE)
    timed = [bool(w) for w in weights]
    assert all(any(pair) for pair in zip(timed[:-1:CYCLE], timed[1::CYCLE], strict=False))
    assert max(len(run) for run in "".join("x" if t else " " for t in timed).split()) == LOOKS


def test_the_first_pass_behind_the_draft_models_is_not_one_of_many():
    looks = Looks()
    assert asked(looks, [True, False, False, False], all_steps=True) == [1, None, 1, 1]
    assert asked(looks, [True, False], all_steps=False)[1] is None


def test_a_step_is_warm_behind_one_of_its_kind():
    looks, warm = Looks(), []
    for kind in (True, True, False, False, True, False):
        looks.ask(kind, all_steps=True)
        warm.append(looks.is_warm)
    assert warm == [False, True, False, True, False, False]


@pytest.mark.parametrize(("is_speculative", "cycle"), [(False, IDLE_CYCLE), (True, CYCLE)])
def test_where_learning_takes_much_of_the_time_looks_are_rarer_and_weigh_more(is_speculative, cycle):
    looks = Looks()
    asked(looks, [is_speculative] * (1 if not is_speculative else cycle))
    now_s = learning_s = 0.0
    untimed = []  # looks at tested drafts only, by call

    def go_on(share, num_cycles=8):
        """Weights of so many cycles, the pace being told now and then, also within a cycle."""
        nonlocal now_s, learning_s
        weights = []
        for _ in range(num_cycles * 4):
            now_s, learning_s = now_s + 0.2, learning_s + 0.2 * share
            looks.pace(now_s, learning_s)
            weights += asked(looks, [is_speculative] * (cycle // 4))
        untimed.append(weights.count(0))
        return [w for w in weights if w]

    assert set(go_on(0.5 * MAX_SHARE)) == {cycle // LOOKS}
    slowed = go_on(2 * MAX_SHARE, num_cycles=40)
    assert slowed[-1] == MAX_STRETCH * cycle // LOOKS
    assert sorted(slowed) == slowed
    assert untimed[1] / 40 < untimed[0] / 8 or not is_speculative
    assert sum(slowed) == pytest.approx(40 * cycle, abs=MAX_STRETCH * cycle)
    assert go_on(0.5 * MAX_SHARE, num_cycles=40)[-1] == MAX_STRETCH * cycle // LOOKS
    assert go_on(0.1 * MAX_SHARE, num_cycles=40)[-1] == cycle // LOOKS
