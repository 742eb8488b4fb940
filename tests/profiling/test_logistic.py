"""Logistic regression against its own optimality conditions and a known truth."""

import numpy as np

from faser_trtllm.profiling.logistic import fit_logistic, logit, sigmoid


def test_recovers_a_known_curve() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(20_000, 2))
    truth = np.array([1.5, -0.7, 0.4])
    labels = (rng.random(20_000) < sigmoid(features @ truth[:2] + truth[2])).astype(float)
    np.testing.assert_allclose(fit_logistic(features, labels, ridge=1e-9), truth, atol=0.07)


def test_gradient_vanishes() -> None:
    rng = np.random.default_rng(1)
    features = rng.normal(size=(300, 3)) * [1.0, 10.0, 0.1]
    labels = (rng.random(300) < 0.3).astype(float)
    weights = fit_logistic(features, labels, ridge=0.01)
    error = sigmoid(features @ weights[:-1] + weights[-1]) - labels
    np.testing.assert_allclose(features.T @ error / 300 + 0.01 * weights[:-1], 0.0, atol=1e-6)
    assert abs(error.mean()) < 1e-6


def test_separable_data_stay_finite() -> None:
    features = np.array([[-1.0], [-2.0], [1.0], [2.0]])
    weights = fit_logistic(features, np.array([0.0, 0.0, 1.0, 1.0]))
    assert np.isfinite(weights).all()
    assert weights[0] > 0


def test_logit_inverts_sigmoid() -> None:
    z = np.linspace(-6, 6, 25)
    np.testing.assert_allclose(logit(sigmoid(z)), z, atol=1e-9)
