"""Read and write MXFP4 (OCP): blocks of 32 four-bit numbers (e2m1) that share a power of two (e8m0) as scale."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.models.fp8 import Float32Array

BLOCK_SIZE = 32
_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# 1000 counts as 0 and not as -0, as in GGUF's decoder.
_NUMBERS = np.concatenate([_LEVELS, np.float32(0) - _LEVELS])
_PAIRS = np.stack([_NUMBERS[np.arange(256) & 15], _NUMBERS[np.arange(256) >> 4]], -1)
_BIAS, _NAN_SCALE = 127, 255


def mxfp4_values(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Float32Array:
    """Decode blocks [rows, n, 16] and scales [rows, n], both uint8, to fp32 [rows, n * 32], exact in bf16, too.

    Byte j has the numbers 2j (low half) and 2j + 1. Values beyond fp32 are infinite, with a scale of 255 NaN.
    """
    numbers = _PAIRS[blocks].reshape(*scales.shape, BLOCK_SIZE)
    with np.errstate(over="ignore"):
        values: Float32Array = np.ldexp(numbers, scales.astype(np.int32)[..., None] - _BIAS)
    values[scales == _NAN_SCALE] = np.nan
    return values.reshape(len(blocks), -1)


def e2m1_numbers(codes: npt.NDArray[np.uint8]) -> Float32Array:
    """Decode two numbers per byte, the low half first: uint8 [rows, n] to fp32 [rows, 2n]."""
    numbers: Float32Array = _PAIRS[codes].reshape(len(codes), -1)
    return numbers


def mxfp4_blocks(groups: Float32Array) -> tuple[npt.NDArray[np.uint8], Float32Array]:
    """Encode finite fp32 [rows, n, 32] as numbers uint8 [rows, n * 16], two per byte, and scales fp32 [rows, n].

    Rounds to nearest, ties to the smaller magnitude. Values that were decoded from MXFP4 are encoded exactly.
    """
    _, exponents = np.frexp(np.abs(groups).max(-1))
    # The largest becomes 4 to 8, or less with the smallest scale.
    scales: Float32Array = np.ldexp(np.float32(1), np.maximum(exponents - 3, -_BIAS))
    sizes = np.abs(groups) / scales[..., None]
    codes = np.searchsorted((_LEVELS[1:] + _LEVELS[:-1]) / 2, sizes).astype(np.uint8)
    codes |= ((groups < 0) & (codes > 0)).astype(np.uint8) << 3
    halves: npt.NDArray[np.uint8] = codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)
    return halves.reshape(len(groups), -1), scales


def scale_bytes(scales: Float32Array) -> npt.NDArray[np.uint8]:
    """Return the bytes of scales that mxfp4_blocks() returned."""
    found: npt.NDArray[np.uint8] = (np.frexp(scales)[1] - 1 + _BIAS).astype(np.uint8)
    return found
