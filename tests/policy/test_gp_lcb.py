"""The Gaussian process is scikit-learn's, and the bound finds the best length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.policy.gp_lcb import GaussianProcess, GpLcbPolicy
from tests.policy.world import World, constant


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_points=st.integers(1, 40),
    length_scale=st.floats(0.1, 2.0),
    signal=st.floats(0.05, 4.0),
    noise=st.floats(1e-3, 0.5),
)
def test_mean_and_deviation_are_scikit_learns(seed, num_points, length_scale, signal, noise):
    rng = np.random.default_rng(seed)
    x, y, where = rng.random((num_points, 3)), rng.standard_normal(num_points), rng.random((7, 3))
    from sklearn.gaussian_process import GaussianProcessRegressor  # here, since every worker collects this file
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    kernel = ConstantKernel(signal, "fixed") * RBF(length_scale, "fixed")
    reference = GaussianProcessRegressor(kernel, alpha=noise, optimizer=None).fit(x, y)
    ours = GaussianProcess(3, 64, length_scale, signal, noise)
    for point, value in zip(x, y, strict=True):
        ours.add(point, value)
    mean, deviation = ours.predict(where)
    expected_mean, expected_deviation = reference.predict(where, return_std=True)
    assert mean == pytest.approx(expected_mean, abs=1e-6)
    assert deviation == pytest.approx(expected_deviation, abs=1e-5)


def test_the_window_forgets_the_oldest_point():
    full = GaussianProcess(1, 3, 0.3, 1.0, 0.01)
    for x, y in ((0.0, 5.0), (0.5, 1.0), (0.7, 2.0), (1.0, 3.0)):
        full.add([x], y)
    fresh = GaussianProcess(1, 3, 0.3, 1.0, 0.01)
    for x, y in ((0.5, 1.0), (0.7, 2.0), (1.0, 3.0)):
        fresh.add([x], y)
    where = np.linspace(0, 1, 5)[:, None]
    assert full.predict(where)[0] == pytest.approx(fresh.predict(where)[0])


@pytest.mark.parametrize(("acceptance", "least", "most"), [(0.0, 0, 1), (0.95, 4, 8)])
def test_the_bound_settles_near_the_best_length(acceptance, least, most):
    world = World(GpLcbPolicy(8), 1, constant(acceptance), noise=0.02)
    world.run(1200)
    late = [max(lengths) for lengths in world.drafted_lengths[-300:]]
    assert least <= np.median(late) <= most
