"""The number format e4m3: a sign, 4 bits of exponent (bias 7) and 3 of mantissa; no infinities, one NaN."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.models.weights import Float32Array

LARGEST = 448.0

_MANTISSA_SHIFT = 20  # from 23 bits of a float32's mantissa to 3
_BIAS_DIFFERENCE = (127 - 7) << 3
_SMALLEST_NORMAL = np.float32(2.0**-6)
_SUBNORMALS_PER_ONE = np.float32(2.0**9)
_NAN = 0x7F


def _numbers() -> Float32Array:
    bits = np.arange(256)
    exponents, mantissas = (bits >> 3) & 15, bits & 7
    sizes = np.where(exponents > 0, (8 + mantissas) * 2.0 ** (exponents - 10.0), mantissas * 2.0**-9)
    sizes[(bits & 127) == _NAN] = np.nan
    return np.where(bits < 128, sizes, -sizes).astype(np.float32)


NUMBERS = _numbers()
"""The number of each byte, float32 [256]."""


def e4m3_from_float32(values: Float32Array) -> npt.NDArray[np.uint8]:
    """The bytes of the nearest e4m3 numbers, ties to even; beyond 448 it is 448, and NaN stays NaN."""
    sizes = np.minimum(np.abs(values), np.float32(LARGEST))
    bits = sizes.view(np.uint32)
    # The carry of rounding moves on into the exponent, as it should.
    halfway = np.uint32((1 << (_MANTISSA_SHIFT - 1)) - 1) + ((bits >> np.uint32(_MANTISSA_SHIFT)) & np.uint32(1))
    normal = ((bits + halfway) >> np.uint32(_MANTISSA_SHIFT)).astype(np.int32) - _BIAS_DIFFERENCE
    is_small = sizes < _SMALLEST_NORMAL
    # The 8th subnormal is the smallest normal number.
    small = np.rint(np.where(is_small, sizes, 0) * _SUBNORMALS_PER_ONE).astype(np.int32)
    found = np.where(is_small, small, normal)
    found[np.isnan(values)] = _NAN
    signs = np.signbit(values).astype(np.uint8) << np.uint8(7)
    encoded: npt.NDArray[np.uint8] = found.astype(np.uint8) | signs
    return encoded
