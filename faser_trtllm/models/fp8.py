"""The fp8 format e4m3, and matrices in it with one scale, or one per output, which TensorRT can multiply.

e4m3 has a sign, 4 bits of exponent with bias 7 and 3 of mantissa; no infinities, one NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

LARGEST = 448.0

_MANTISSA_SHIFT = 20  # from 23 bits of a float32's mantissa to 3
_BIAS_DIFFERENCE = (127 - 7) << 3
_SMALLEST_NORMAL = np.float32(2.0**-6)
_SUBNORMALS_PER_ONE = np.float32(2.0**9)
_NAN = 0x7F
_SMALLEST_LARGEST = 1e-30  # smaller values count as zero, so that scales and their products stay normal numbers
_ROWS_PER_PIECE = 256  # bounds the memory of rounding


def _numbers() -> Float32Array:
    bits = np.arange(256)
    exponents, mantissas = (bits >> 3) & 15, bits & 7
    sizes = np.where(exponents > 0, (8 + mantissas) * 2.0 ** (exponents - 10.0), mantissas * 2.0**-9)
    sizes[(bits & 127) == _NAN] = np.nan
    return np.where(bits < 128, sizes, -sizes).astype(np.float32)


NUMBERS = _numbers()
"""The value of each e4m3 byte, float32 [256]."""


def e4m3_from_float32(values: Float32Array) -> npt.NDArray[np.uint8]:
    """Return the nearest e4m3 numbers as bytes: ties to even, at most 448 in magnitude; NaN stays NaN."""
    sizes = np.minimum(np.abs(values), np.float32(LARGEST))
    bits = sizes.view(np.uint32)
    # If rounding carries out of the mantissa, the exponent correctly grows by one.
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


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix in e4m3; a weight is its e4m3 number times its scale.

    bits: uint8 [out, in]. scales: float32 [] or [out]. ValueError unless the shapes fit and all scales are positive and
    finite, which TensorRT requires.
    """

    bits: npt.NDArray[np.uint8]
    scales: Float32Array

    def __post_init__(self) -> None:
        if self.bits.ndim != 2 or self.scales.shape not in ((), self.bits.shape[:1]):
            raise ValueError(f"scales {list(self.scales.shape)} do not fit a matrix of {list(self.bits.shape)}")
        if not (np.isfinite(self.scales) & (self.scales > 0)).all():
            raise ValueError("a scale is not positive and finite")

    @property
    def has_output_scales(self) -> bool:
        return self.scales.ndim == 1


def scale_of(largest: float) -> np.float32:
    """Return the scale that maps the largest absolute value to 448, as in ModelOpt; 1 if all are zero."""
    scale: np.float32 = np.float32(largest / LARGEST if largest > _SMALLEST_LARGEST else 1)
    return scale


def quantize(parts: Sequence[Float32Array]) -> Fp8Matrix:
    """Stack matrices [out[i], in] and quantize them with one scale. ValueError if a weight is not finite."""
    if not all(np.isfinite(part).all() for part in parts):
        raise ValueError("a weight is not finite")
    scale = scale_of(max(float(np.abs(part).max(initial=0)) for part in parts))
    return Fp8Matrix(np.concatenate([_rounded(part, scale) for part in parts]), np.array(scale))


def stack(parts: Sequence[Fp8Matrix]) -> Fp8Matrix:
    """Stack matrices along their outputs.

    If they share one scale, or one of them has a scale per output, their numbers stay unchanged. Otherwise they are
    rounded again to the largest of their scales, as in TensorRT-LLM, because fp8 products are fastest with one scale.
    """
    if any(part.has_output_scales for part in parts):
        scales = np.concatenate([np.broadcast_to(part.scales, len(part.bits)) for part in parts])
        return Fp8Matrix(np.concatenate([part.bits for part in parts]), scales)
    largest = max(part.scales for part in parts)
    bits = [
        part.bits if part.scales == largest else _rounded(NUMBERS[part.bits] * part.scales, largest) for part in parts
    ]
    return Fp8Matrix(bits[0] if len(bits) == 1 else np.concatenate(bits), np.array(largest, np.float32))


def _rounded(weight: Float32Array, scale: Float32Array | np.float32) -> npt.NDArray[np.uint8]:
    bits = np.empty(weight.shape, np.uint8)
    for start in range(0, len(weight), _ROWS_PER_PIECE):
        rows = slice(start, start + _ROWS_PER_PIECE)
        bits[rows] = e4m3_from_float32(weight[rows] / scale)
    return bits
