"""Rounding once: sums and products that are exact in float64, then rounded to a narrower type as PTX's modes say."""

from __future__ import annotations

import ctypes
import ctypes.util

import numpy as np

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fma.restype = ctypes.c_double
_libm.fma.argtypes = [ctypes.c_double] * 3
_fma_of_one = np.frompyfunc(_libm.fma, 3, 1)

Array = np.ndarray


def exact_sum(a: Array, b: Array) -> Array:
    """a + b of float64, rounded to odd: to any type with 26 bits or more less, it then rounds as the exact sum does."""
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)
    is_rounded = (lost != 0) & np.isfinite(total) & np.isfinite(lost)
    if not is_rounded.any():
        return total
    is_even = (total.view(np.int64) & 1) == 0
    toward = np.where(lost > 0, np.inf, -np.inf)
    return np.where(is_rounded & is_even, np.nextafter(total, toward), total)


def to_float32(x: Array, mode: str) -> Array:
    """float64 numbers in a mode of PTX: rn (to nearest, ties to even), rz (to zero), rm (down), rp (up)."""
    near = x.astype(np.float32)
    if mode == "rn":
        return near
    back = near.astype(np.float64)
    if mode == "rm":
        return np.where(back > x, np.nextafter(near, np.float32(-np.inf)), near)
    if mode == "rp":
        return np.where(back < x, np.nextafter(near, np.float32(np.inf)), near)
    return np.where(np.abs(back) > np.abs(x), np.nextafter(near, np.float32(0)), near)


def add32(a: Array, b: Array, mode: str) -> Array:
    """float32 sums."""
    return a + b if mode == "rn" else _rounded_sum(a.astype(np.float64), b.astype(np.float64), mode)


def multiply32(a: Array, b: Array, mode: str) -> Array:
    """float32 products."""
    return a * b if mode == "rn" else to_float32(a.astype(np.float64) * b.astype(np.float64), mode)


def fma32(a: Array, b: Array, c: Array, mode: str) -> Array:
    """a * b + c of float32, rounded once: the product is exact in float64."""
    return _rounded_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64), mode)


def _rounded_sum(a: Array, b: Array, mode: str) -> Array:
    total = exact_sum(a, b)
    if mode == "rm":  # nothing left of two signs is -0
        total = np.where((total == 0) & (np.signbit(a) | np.signbit(b)), -0.0, total)
    return to_float32(total, mode)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float64, rounded once to nearest, by the C library."""
    return np.asarray(_fma_of_one(a, b, c), np.float64)


def whole(x: Array, mode: str) -> Array:
    """Floats rounded to whole numbers: rni, rzi, rmi, rpi."""
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)


def to_bf16(x: Array) -> Array:
    """float32 to the bits of bf16, to nearest, ties to even; any NaN becomes 0x7fff."""
    bits = x.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def from_bf16(bits: Array) -> Array:
    """bf16 bits as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_f16(x: Array) -> Array:
    """float32 to the bits of f16, to nearest, ties to even; any NaN becomes 0x7fff."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


_CODES = np.arange(256)
_EXPONENTS, _MANTISSAS = _CODES >> 3 & 15, _CODES & 7
_E4M3 = np.where(_EXPONENTS > 0, (8 + _MANTISSAS) * 2.0 ** (_EXPONENTS - 10), _MANTISSAS * 2.0**-9)
_E4M3 = np.where(_CODES & 127 == 127, np.nan, np.where(_CODES > 127, -_E4M3, _E4M3)).astype(np.float32)
LARGEST_E4M3 = 448.0


def from_e4m3(codes: Array) -> Array:
    """e4m3 codes as float32."""
    return _E4M3[codes]


def to_e4m3(x: Array) -> Array:
    """float32 to e4m3 codes, to nearest, ties to even, saturated at +-448; NaN becomes 0x7f."""
    size = np.abs(x).astype(np.float64)
    exponent = np.maximum(np.frexp(np.where(np.isfinite(size), size, 1.0))[1] - 1, -6)
    step = 2.0 ** (exponent - 3)
    rounded = np.minimum(np.rint(size / step) * step, LARGEST_E4M3)
    code = np.searchsorted(_E4M3[:127], np.where(np.isnan(rounded), 0, rounded)).astype(np.uint8)
    signed = code | (np.signbit(x).astype(np.uint8) << np.uint8(7))
    return np.where(np.isnan(x), np.uint8(0x7F), signed)
