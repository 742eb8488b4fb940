"""Drawing one token from a law: the numpy references of plugins/cpu/draw.cpp."""

from __future__ import annotations

import numpy as np

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
    uniforms = race_uniforms(key, position, p.size)
    times = np.full(p.size, np.inf)
    alive = p > 0
    times[alive] = -np.log1p(-uniforms[alive]) / p[alive].astype(np.float64)
    return int(np.argmin(times))


def residual(p: Float32Array, q: Float32Array) -> Float32Array:
    """(p - q)+, not normalised."""
    return np.maximum(p - q, np.float32(0))
