"""The clock of a simulated machine whose speed changes."""

import itertools

import pytest

from benchmarks.policies.varying_clock import ChangingClock


def advances(slowdown, seed=0, num=20_000):
    clock = ChangingClock(slowdown, seed)
    factors = []
    for _ in range(num):
        before_s = clock.now_s()
        clock.advance(1e-3)
        factors.append(1e3 * (clock.now_s() - before_s))
    return clock, factors


def test_nominal_time_is_that_of_the_fastest_machine():
    clock, factors = advances(1.7)
    assert clock.nominal_s() == pytest.approx(20.0)
    assert clock.now_s() == pytest.approx(1e-3 * sum(factors))
    assert 20.0 < clock.now_s() < 1.7 * 20.0


def test_the_speed_stays_for_stretches_and_within_its_bound():
    _, factors = advances(1.7)
    means = [sum(factors[i : i + 100]) / 100 for i in range(0, len(factors), 100)]
    assert 0.98 < min(means) < 1.1
    assert 1.5 < max(means) < 1.75
    steps = [abs(b - a) for a, b in itertools.pairwise(means)]
    assert sum(step > 0.05 for step in steps) < 0.4 * len(steps)


def test_a_seed_repeats_itself():
    assert advances(1.7, seed=3)[1] == advances(1.7, seed=3)[1]
    assert advances(1.7, seed=3)[1] != advances(1.7, seed=4)[1]
