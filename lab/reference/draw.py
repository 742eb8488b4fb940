"""Draw one token from a distribution: references of plugins/cpu/sampling/draw.cpp."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.ops.arrays import Float32Array
from lab.reference.philox import gumbel_uniforms


def draw_token(weights: Float32Array, u: float) -> int:
    """Return the first index whose running sum of weights [n] exceeds u x their total; -1 if the total is 0."""
    sums = np.cumsum(weights, dtype=np.float64)
    if sums[-1] == 0.0:
        return -1
    token = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return min(token, int(np.flatnonzero(weights)[-1]))


def gumbel_max_token(p: Float32Array, key: int, position: int) -> int:
    """Draw from p [vocab_size] with the Gumbel-max trick, as an exponential race: argmin over p_v > 0 of E_v / p_v with
    E_v = -log(U(key, position, v))."""
    return int(np.argmin(_arrival_times(p, key, position)))


def gumbel_lead(p: Float32Array, key: int, position: int) -> float:
    """Return how much log-probability the token of gumbel_max_token could lose and still win: log(second smallest E_v /
    p_v / smallest), infinite if p has only one token."""
    best, second = np.sort(_arrival_times(p, key, position))[:2] if p.size > 1 else (1.0, np.inf)
    return float(np.log(second / best))


def gumbel_runner_up(p: Float32Array, key: int, position: int) -> int:
    """Return the token that gumbel_max_token would give if its own were impossible; -1 if p has only one token."""
    times = _arrival_times(p, key, position)
    second = int(np.argsort(times, kind="stable")[1]) if p.size > 1 else 0
    return second if times.size > 1 and times[second] < np.inf else -1


def _arrival_times(p: Float32Array, key: int, position: int) -> npt.NDArray[np.float64]:
    uniforms = gumbel_uniforms(key, position, p.size)
    times = np.full(p.size, np.inf)
    possible = p > 0
    times[possible] = -np.log1p(-uniforms[possible]) / p[possible].astype(np.float64)
    return times


def residual(p: Float32Array, q: Float32Array) -> Float32Array:
    """Return (p - q)+, not normalized."""
    rest: Float32Array = np.maximum(p - q, np.float32(0))
    return rest
