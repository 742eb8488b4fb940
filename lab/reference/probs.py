"""References of ops/probs.py."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.ops.arrays import (
    Float32Array,
    SamplingArray,
)
from faser_trtllm.ops.probs import _F, _LARGEST, RowStatus, edited_logits


def next_token_probs_reference(
    sampling: SamplingArray, slot: int, logits: Float32Array, num_tokens: int, probs: Float32Array
) -> RowStatus:
    """Compute next_token_probs() in numpy, operation by operation in float32."""
    status, x = edited_logits(sampling, slot, logits[: probs.size], num_tokens)
    if status is not RowStatus.OK:
        return status
    entry = sampling[slot]
    if entry["mode"] == native.GREEDY:
        probs[:] = 0
        probs[np.argmax(x)] = 1
        return RowStatus.OK
    with np.errstate(over="ignore", divide="ignore"):
        inv_temperature = min(_F(1) / _F(entry["temperature"]), _LARGEST)
        weights = exp_non_positive((x - x.max()) * inv_temperature)
    order = np.lexsort((np.arange(x.size), -x.astype(np.float64)))
    order = order[weights[order] > 0]
    if 0 < entry["top_k"] < x.size:
        order = order[: entry["top_k"]]
    if entry["top_p"] < 1:
        sums = np.cumsum(weights[order], dtype=np.float64)
        order = order[: int(np.searchsorted(sums, np.float64(entry["top_p"]) * sums[-1], side="left")) + 1]
    if entry["min_p"] > 0:
        order = order[weights[order] >= entry["min_p"]]
    probs[:] = 0
    probs[order] = weights[order]
    probs *= _F(1.0 / probs.sum(dtype=np.float64))
    return RowStatus.OK


def exp_non_positive(z: Float32Array) -> Float32Array:
    """Return exp of z [n] <= 0 by the native library's polynomial; 0 below -72."""
    z = z.astype(np.float32)
    inside = z >= _F(-72)
    z = np.where(inside, z, _F(0))
    shifted = z * _F(1.44269504) + _F(12582912)
    n = shifted - _F(12582912)
    r = (z - n * _F(0.693359375)) - n * _F(-2.12194440e-4)
    poly = np.full_like(r, _F(1.9875691500e-4))
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        poly = poly * r + _F(coefficient)
    poly = (poly * (r * r) + r) + _F(1)
    found: Float32Array = np.where(inside, np.ldexp(poly, n.astype(np.int32)), _F(0))
    return found
