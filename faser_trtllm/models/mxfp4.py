"""MXFP4: blocks of 32 four-bit numbers (e2m1) that share a power of two (e8m0), of the OCP's microscaling formats."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.models.fp8 import Float32Array

BLOCK_SIZE = 32
_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# 1000 counts as 0 and not as -0, as in GGUF's decoder.
_NUMBERS = np.concatenate([_LEVELS, np.float32(0) - _LEVELS])
_PAIRS = np.stack([_NUMBERS[np.arange(256) & 15], _NUMBERS[np.arange(256) >> 4]], -1)
_BIAS = 127


def mxfp4_values(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Float32Array:
    """Blocks [rows, n, 16] and their scales [rows, n], uint8 -> fp32 [rows, n * 32], exact in bf16 too.

    Byte j of a block has the numbers 2j (low half) and 2j + 1. A scale of 255 is no number; what is beyond fp32 is
    infinite.
    """
    numbers = _PAIRS[blocks].reshape(*scales.shape, BLOCK_SIZE)
    with np.errstate(over="ignore"):
        values: Float32Array = np.ldexp(numbers, scales.astype(np.int32)[..., None] - _BIAS)
    return values.reshape(len(blocks), -1)
