"""References of models/quantized_weight.py."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ACTIVATION_GROUP_SIZE = 128  # inputs that share an activation's scale if weights have one per output


def quantize_activations(x: npt.NDArray[np.float32], group_size: int) -> npt.NDArray[np.float32]:
    """Round inputs [rows, in] like a scheme with 8-bit activations, to float32 of the same shape.

    Each row's groups of inputs (the last may be short) have a scale of max |x| / 127; integers round to nearest even.
    """
    size = group_size or ACTIVATION_GROUP_SIZE
    found = np.empty_like(x)
    for first in range(0, x.shape[1], size):
        group = x[:, first : first + size]
        most = np.abs(group).max(1, keepdims=True)
        inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
        found[:, first : first + size] = np.rint(group * inverse) * (most / np.float32(127))
    return found
