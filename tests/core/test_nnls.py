"""Non-negative least squares: the optimum, which the Karush-Kuhn-Tucker conditions tell from any other point."""

import numpy as np
import pytest

from faser_trtllm.core.nnls import nnls


def test_what_is_positive_is_found_exactly():
    design = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    assert nnls(design, design @ [3.0, 0.5]) == pytest.approx([3.0, 0.5])


def test_what_would_be_negative_is_zero_and_the_rest_is_fitted_without_it():
    """Plain least squares gives (2, -1); clamping that would leave (2, 0), but the best fit is the mean."""
    design = np.array([[1.0, 0.0], [1.0, 1.0]])
    assert nnls(design, np.array([2.0, 1.0])) == pytest.approx([1.5, 0.0])


@pytest.mark.parametrize("seed", range(20))
def test_no_other_point_is_better(seed):
    """Tall, square and wide problems with columns that nearly repeat each other, as stairs and slopes do."""
    rng = np.random.default_rng(seed)
    m, n = int(rng.integers(2, 40)), int(rng.integers(1, 30))
    design = np.maximum.accumulate(rng.random((m, n)), axis=1) + 1e-3 * rng.random((m, n))
    target = rng.normal(0.5, 1.0, m)
    x = nnls(design, target)
    gradient = design.T @ (design @ x - target)
    assert (x >= 0.0).all()
    assert (gradient >= -1e-6).all(), "some unknown should be larger"
    assert np.abs(gradient[x > 0.0]).max(initial=0.0) < 1e-6, "some unknown should be smaller"


def test_nothing_is_found_where_nothing_helps():
    assert nnls(np.eye(3), -np.ones(3)).tolist() == [0.0, 0.0, 0.0]
    assert nnls(np.zeros((2, 2)), np.ones(2)).tolist() == [0.0, 0.0]
