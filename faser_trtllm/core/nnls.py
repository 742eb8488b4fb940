"""Non-negative least squares."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

TOLERANCE = 1e-10  # stop when no gradient exceeds this share of the largest gradient at zero


def nnls(design: FloatArray, target: FloatArray) -> FloatArray:
    """Return the non-negative x [n] that minimizes |design @ x - target|, for design [m, n] and target [m].

    Lawson and Hanson's active set method: unknowns are freed one by one, that of the largest gradient first, and fixed
    at 0 again where a step would make them negative.
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
    """Solve least squares for the free unknowns; the others are 0."""
    x = np.zeros(free.size)
    x[free] = np.linalg.lstsq(design[:, free], target, rcond=None)[0]
    return x
