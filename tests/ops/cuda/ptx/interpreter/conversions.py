"""cvt: between integers and floats of all widths, and pairs of small floats."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ops.cuda.ptx.interpreter import arithmetic as numbers
from tests.ops.cuda.ptx.interpreter import rounding
from tests.ops.cuda.ptx.interpreter.decoding import Decoder, Run, dtype_of, lift
from tests.ops.cuda.ptx.interpreter.program import BYTES

Array = np.ndarray
FLOATS = ("f16", "bf16", "f32", "f64")
_PAIRS = ("f16x2", "bf16x2", "e4m3x2")


def convert(decoder: Decoder) -> Run:
    """cvt of one number; of two, the first of which becomes the upper half; of a pair."""
    mode = decoder.take(("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"))
    ftz, saturate, finite = decoder.take(("ftz",)), decoder.take(("sat",)), decoder.take(("satfinite",))
    if len(decoder.modifiers) != 2:
        raise decoder.unknown()
    to, source = decoder.modifiers
    if to in _PAIRS or source in _PAIRS:
        return _pairs(decoder, to, source, mode, bool(finite))
    if to not in BYTES or source not in BYTES or finite:
        raise decoder.unknown()
    function = _function(to, source, mode, bool(saturate))
    if function is None or (ftz and "f32" not in (to, source)):
        raise decoder.unknown()
    whole = function
    if ftz:

        def whole(x: Array) -> Array:
            found = function(numbers.flushed(x) if source == "f32" else x)
            return numbers.flushed(found) if to == "f32" else found

    decoder.expect(2)
    d, a = decoder.operands
    return lift(whole, [decoder.get(a, source, narrow=True)], decoder.put(d, to, widen=True))


def _pairs(decoder: Decoder, to: str, source: str, mode: str, finite: bool) -> Run:
    if mode != "rn" or finite != (to == "e4m3x2"):
        raise decoder.unknown()
    if source == "f32":
        decoder.expect(3)
        d, upper, lower = decoder.operands
        one = {"f16x2": rounding.to_f16, "bf16x2": rounding.to_bf16, "e4m3x2": rounding.to_e4m3}[to]
        half = np.dtype(f"u{BYTES[to]}")

        def join(high: Array, low: Array) -> Array:
            return one(high).astype(half) << half.type(4 * half.itemsize) | one(low).astype(half)

        return lift(join, [decoder.get(upper, "f32"), decoder.get(lower, "f32")], decoder.put(d, to))
    decoder.expect(2)
    d, a = decoder.operands
    if (to, source) == ("f16x2", "e4m3x2"):
        get, put = decoder.get(a, source), decoder.put(d, to)
        return lift(lambda codes: rounding.to_f16(rounding.from_e4m3(codes.view(np.uint8))).view(np.uint32), [get], put)
    raise decoder.unknown()


def _function(to: str, source: str, mode: str, saturate: bool) -> Callable[[Array], Array] | None:
    if to in FLOATS and source in FLOATS:
        return _between_floats(to, source, mode, saturate)
    if saturate:
        return None
    if to in FLOATS:
        return _from_integer(to, mode)
    if source in FLOATS:
        if source == "bf16" or mode not in ("rni", "rzi", "rmi", "rpi"):
            return None
        return lambda x: _to_integer(rounding.whole(x, mode), to, source)
    dtype = dtype_of(to)
    return None if mode else lambda x: x.astype(dtype)


def _from_integer(to: str, mode: str) -> Callable[[Array], Array] | None:
    if to == "f32" and mode in ("rn", "rz", "rm", "rp"):
        return lambda x: rounding.to_float32(_exact(x), mode)
    if to == "f64" and mode == "rn":
        return lambda x: x.astype(np.float64)
    return None


def _exact(x: Array) -> Array:
    """Integers as float64, rounded to odd where they have more bits."""
    if x.dtype.itemsize < 8:
        return x.astype(np.float64)
    half = x.dtype.type(32)
    return rounding.exact_sum(
        (x >> half).astype(np.float64) * 2.0**32, (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
    )


def _to_integer(x: Array, to: str, source: str) -> Array:
    """Whole floats, cut off at the type's limits. NaN is 0, but the top bit where f64 or 64 bits are involved."""
    dtype = dtype_of(to)
    limits = np.iinfo(dtype)
    wide = x.astype(np.float64)
    inside = (wide > float(limits.min)) & (wide < float(limits.max))
    found = np.where(inside, wide, 0).astype(dtype)
    found = np.where(wide >= float(limits.max), dtype.type(limits.max), found)
    found = np.where(wide <= float(limits.min), dtype.type(limits.min), found)
    nothing = 1 << limits.bits - 1 if source == "f64" or limits.bits == 64 else 0
    return np.where(np.isnan(wide), np.uint64(nothing).astype(dtype), found)


def _between_floats(to: str, source: str, mode: str, saturate: bool) -> Callable[[Array], Array] | None:
    if to == source == "f32":
        if mode in ("rni", "rzi", "rmi", "rpi"):
            return lambda x: numbers.canonical(_limited(rounding.whole(x, mode), saturate))
        return (lambda x: numbers.canonical(_limited(x, saturate))) if not mode else None
    if to == source == "f64":
        return (lambda x: rounding.whole(x, mode)) if mode in ("rni", "rzi", "rmi", "rpi") and not saturate else None
    if to == "f32" and source == "bf16" and not mode:
        return lambda x: numbers.canonical(_limited(rounding.from_bf16(x), saturate))
    if saturate and to != "f32":
        return None
    if BYTES[to] > BYTES[source] and source != "bf16" and to != "bf16" and not mode:
        return lambda x: _limited(x.astype(dtype_of(to)), saturate)
    if to == "f32" and source == "f64" and mode in ("rn", "rz", "rm", "rp"):
        return lambda x: numbers.canonical(_limited(rounding.to_float32(x, mode), saturate))
    if source == "f32" and mode == "rn" and to in ("f16", "bf16"):
        return (lambda x: rounding.to_f16(x).view(np.float16)) if to == "f16" else rounding.to_bf16
    return None


def _limited(x: Array, saturate: bool) -> Array:
    return np.clip(np.where(np.isnan(x), x.dtype.type(0), x), 0, 1) if saturate else x


TABLE: dict[str, Callable[[Decoder], Run]] = {"cvt": convert}
