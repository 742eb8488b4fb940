"""Non-negative least squares."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

TOLERANCE = 1e-10  # of the largest gradient at zero, below which nothing more is gained


def nnls(design: FloatArray, target: FloatArray) -> FloatArray:
    """design [m, n], target [m] -> x [n], none of them negative, that minimises |design @ x - target|.

    Lawson and Hanson's active set: unknowns become free one by one, the one that promises most first, and go back to 0
    where a step would make them negative.
    """
    q, r = np.linalg.qr(design)  # the same problem in at most n rows
    goal = q.T @ target
    n = design.shape[1]
    x, free = np.zeros(n), np.zeros(n, dtype=bool)
    least = TOLERANCE * float(np.abs(r.T @ goal).max(initial=0.0))
    for _ in range(3 * n):
        gradient = np.where(free, -np.inf, r.T @ (goal - r @ x))
        best = int(np.argmax(gradient))
        if gradient[best] <= least:
            break
        free[best] = True
        step = _solve(r, goal, free)
        while step.min() < 0.0:
            falling = step < 0.0
            share = x[falling] / (x[falling] - step[falling])
            x += float(share.min()) * (step - x)
            free[np.flatnonzero(falling)[share.argmin()]] = False
            free &= x > 0.0
            x[~free] = 0.0
            step = _solve(r, goal, free)
        x = step
    return x


def _solve(design: FloatArray, target: FloatArray, free: npt.NDArray[np.bool_]) -> FloatArray:
    """Least squares of the free unknowns; the others are 0."""
    x = np.zeros(free.size)
    x[free] = np.linalg.lstsq(design[:, free], target, rcond=None)[0]
    return x
