"""An upper bound for the gain from choosing the draft length by load over one fixed length, for any mix of loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

ITERATIONS = 20_000


def adaptivity_bound(fixed: Mapping[str, Sequence[float]], best: Sequence[float]) -> float:
    """Return the value of a matrix game, from above, within about 2%.

    fixed: tok/s of each fixed length by load. best: tok/s of the best system by load. A trace spends a share w of its
    work at each load; a fixed length then takes sum(w x best / fixed) times as long as the best choice at every load.
    The value is the maximum over w of the minimum over lengths. No policy that is as fast as `best` at each load can
    beat the best fixed length by more on any trace over these loads.
    """
    slowdown = np.asarray(best) / np.asarray(list(fixed.values()))  # [lengths, loads]
    lengths, loads = np.ones(slowdown.shape[0]), np.ones(slowdown.shape[1])
    mean_lengths = np.zeros(slowdown.shape[0])
    spread = max(float(slowdown.max() - slowdown.min()), 1e-9)
    rate = np.sqrt(8.0 * np.log(max(slowdown.shape) + 1.0) / ITERATIONS) / spread
    for _ in range(ITERATIONS):  # multiplicative weights for both players (Freund and Schapire 1999)
        p, w = lengths / lengths.sum(), loads / loads.sum()
        mean_lengths += p
        lengths = p * np.exp(-rate * (slowdown @ w))
        loads = w * np.exp(rate * (p @ slowdown))
    return float((mean_lengths / ITERATIONS @ slowdown).max())
