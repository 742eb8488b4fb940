"""Drawing one token from a law: the numpy references of plugins/cpu/draw.cpp."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.ops.arrays import Float32Array
from faser_trtllm.ops.philox import race_uniforms


def draw_token(weights: Float32Array, u: float) -> int:
    """The first index whose running sum of weights [n] exceeds u x their total; -1 if the total is 0."""
    sums = np.cumsum(weights, dtype=np.float64)
    if sums[-1] == 0.0:
        return -1
    token = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return min(token, int(np.flatnonzero(weights)[-1]))


def race_token(p: Float32Array, key: int, position: int) -> int:
    """argmin over p_v > 0 of E_v / p_v with E_v = -log(U(key, position, v)); its law is p [vocab_size]."""
    return int(np.argmin(_race_times(p, key, position)))


def race_lead(p: Float32Array, key: int, position: int) -> float:
    """log(time of the second / time of the winner) of race_token, infinite if nothing else runs: how much the winner's
    log-probability could lose against all others without losing the race."""
    best, second = np.sort(_race_times(p, key, position))[:2] if p.size > 1 else (1.0, np.inf)
    return float(np.log(second / best))


def _race_times(p: Float32Array, key: int, position: int) -> npt.NDArray[np.float64]:
    uniforms = race_uniforms(key, position, p.size)
    times = np.full(p.size, np.inf)
    alive = p > 0
    times[alive] = -np.log1p(-uniforms[alive]) / p[alive].astype(np.float64)
    return times


def residual(p: Float32Array, q: Float32Array) -> Float32Array:
    """(p - q)+, not normalised."""
    return np.maximum(p - q, np.float32(0))
