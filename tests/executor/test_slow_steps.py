"""Tests of what counts as a slow step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.executor.slow_steps import SlowSteps


def slow_s(*steps_s):
    steps = SlowSteps()
    for step_s in steps_s:
        steps.observe(step_s)
    return steps.slow_s


def test_one_long_step_may_be_a_hang_and_two_are_the_model():
    assert slow_s() == 0
    assert slow_s(30.0) == 0
    assert slow_s(30.0, 0.01, 0.01) == pytest.approx(0.01)
    assert slow_s(5.0, 0.01, 5.5) == pytest.approx(5.25)


def test_two_hangs_are_forgotten_among_thousands_of_steps():
    assert slow_s(30.0, 30.0, *[0.01] * 1000) == pytest.approx(30.0)
    assert slow_s(30.0, 30.0, *[0.01] * 2000) == pytest.approx(0.01)


def test_prompts_that_take_long_count_among_steps_that_do_not():
    assert slow_s(*[3.0, *[0.05] * 400] * 10) == pytest.approx(3.0)


@given(st.lists(st.floats(0.0, 4000.0), min_size=2, max_size=50))
def test_it_is_the_second_slowest_of_few_but_for_a_factor_of_two(steps_s):
    """Below 1 ms and above 512 s it does not matter how slow."""
    second = sorted(steps_s)[-2]
    assert second / 2 <= slow_s(*steps_s) <= 2 * second or not 2**-10 < second <= 512
