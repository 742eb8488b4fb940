"""The bound on what adapting to the load can win, against games whose value is known."""

import numpy as np
import pytest
from scipy.optimize import linprog

from benchmarks.policies.bound import adaptivity_bound


def exact(fixed, best):
    """max over w of t with sum(w) = 1 and, for each length, sum(w x slowdown) >= t."""
    slowdown = np.asarray(best) / np.asarray(list(fixed.values()))
    k, loads = slowdown.shape
    found = linprog(
        [*np.zeros(loads), -1.0],
        A_ub=np.hstack([-slowdown, np.ones((k, 1))]),
        b_ub=np.zeros(k),
        A_eq=[[*np.ones(loads), 0.0]],
        b_eq=[1.0],
    )
    return found.x[-1]


def test_one_length_that_is_best_everywhere_leaves_nothing_to_win():
    assert adaptivity_bound({"fixed:2": [2, 3], "fixed:4": [1, 1]}, [2, 3]) == pytest.approx(1.0, abs=5e-3)


def test_two_lengths_that_are_good_at_one_load_each():
    """Half of the work at each load makes both take 1.5 times as long."""
    assert adaptivity_bound({"fixed:2": [1, 2], "fixed:4": [2, 1]}, [2, 2]) == pytest.approx(1.5, abs=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_value_of_the_game(seed):
    rng = np.random.default_rng(seed)
    rates = rng.uniform(0.7, 3.0, (8, 6))
    best = rates.max(0) * rng.uniform(1.0, 1.3, 6)
    fixed = {f"fixed:{k}": row.tolist() for k, row in enumerate(rates, 1)}
    value = exact(fixed, best)
    assert value - 1e-6 <= adaptivity_bound(fixed, best.tolist()) <= 1.02 * value
