"""Logistic regression by damped Newton steps, for a few features and thousands of observations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

RIDGE = 1e-3  # whatever the number of observations; keeps weights finite on separable data
MAX_STEPS = 50


def fit_logistic(features: FloatArray, labels: FloatArray, ridge: float = RIDGE) -> FloatArray:
    """Fit weights [d + 1], the intercept last, to features [n, d] and labels [n] of 0 and 1.

    Maximizes the mean log-likelihood minus ridge / 2 times the sum of squared weights (without the intercept).
    """
    n = labels.size
    design = np.column_stack([features, np.ones(n)])
    penalty = np.full(design.shape[1], ridge)
    penalty[-1] = 1e-9
    weights = np.zeros(design.shape[1])

    def loss(w: FloatArray) -> float:
        z = design @ w
        return float(np.mean(np.logaddexp(0.0, z) - labels * z) + 0.5 * np.sum(penalty * w * w))

    current = loss(weights)
    for _ in range(MAX_STEPS):
        p = sigmoid(design @ weights)
        gradient = design.T @ (p - labels) / n + penalty * weights
        hessian = (design * (p * (1 - p))[:, None]).T @ design / n + np.diag(penalty)
        step = np.linalg.solve(hessian, gradient)
        scale = 1.0
        while scale > 1e-6 and loss(weights - scale * step) > current:
            scale /= 2
        weights = weights - scale * step
        previous, current = current, loss(weights)
        if previous - current < 1e-10:
            break
    return weights


def sigmoid(z: npt.ArrayLike) -> FloatArray:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * np.asarray(z, np.float64))))


def logit(p: npt.ArrayLike) -> FloatArray:
    clipped = np.clip(np.asarray(p, np.float64), 1e-4, 1 - 1e-4)
    return np.asarray(np.log(clipped / (1 - clipped)))
