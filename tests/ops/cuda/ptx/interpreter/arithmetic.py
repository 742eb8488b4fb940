"""Numbers: what integer and float instructions compute, for arrays of their types."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from tests.ops.cuda.ptx.interpreter import rounding
from tests.ops.cuda.ptx.interpreter.program import BYTES

Array = np.ndarray
Function = Callable[..., Array]

NAN32 = np.uint32(0x7FFFFFFF).view(np.float32)
_TINY = {4: np.float32(2.0**-126), 8: np.float64(2.0**-1022)}


def bits_of(x: Array) -> Array:
    """Return the bits of x as unsigned integers."""
    return x.view(f"u{x.dtype.itemsize}")


def canonical(x: Array) -> Array:
    """float32 results: PTX does not keep the payload of a NaN."""
    bad = x != x
    return np.where(bad, NAN32, x) if bad.any() else x


def flushed(x: Array) -> Array:
    """Subnormal numbers as zeros of their sign."""
    return np.where(np.abs(x) < _TINY[x.dtype.itemsize], np.copysign(x.dtype.type(0), x), x)


def maximum(a: Array, b: Array) -> Array:
    """Return the elementwise maximum of floats: a number beats NaN, +0 beats -0."""
    return np.where(a == b, (bits_of(a) & bits_of(b)).view(a.dtype), np.fmax(a, b))


def minimum(a: Array, b: Array) -> Array:
    """Return the elementwise minimum of floats: a number beats NaN, -0 beats +0."""
    return np.where(a == b, (bits_of(a) | bits_of(b)).view(a.dtype), np.fmin(a, b))


def negative(a: Array) -> Array:
    """The other sign, of NaN too."""
    top = bits_of(a).dtype.type(1 << 8 * a.dtype.itemsize - 1)
    return (bits_of(a) ^ top).view(a.dtype)


def divide(a: Array, b: Array) -> Array:
    """Integers, toward zero. Division by zero is unspecified: all ones, as GPUs give."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = (a - np.fmod(a, safe)) // safe
    return np.where(b == 0, a.dtype.type(-1) if a.dtype.kind == "i" else ~a.dtype.type(0), quotient)


def remainder(a: Array, b: Array) -> Array:
    """Integers, with the dividend's sign; by zero it is the dividend, as unspecified as divide()."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    return np.where(b == 0, a, np.fmod(a, safe))


def shift_left(a: Array, amount: Array) -> Array:
    """Amounts of 32 bits; those beyond the width leave nothing."""
    width = 8 * a.dtype.itemsize
    return np.where(amount >= width, a.dtype.type(0), a << np.minimum(amount, width - 1).astype(a.dtype))


def shift_right(a: Array, amount: Array) -> Array:
    """With the sign of signed numbers; amounts beyond the width leave nothing else."""
    width = 8 * a.dtype.itemsize
    rest = a >> np.minimum(amount, width - 1).astype(a.dtype)
    return rest if a.dtype.kind == "i" else np.where(amount >= width, a.dtype.type(0), rest)


def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of products."""
    if a.dtype.itemsize < 8:
        wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
        return (a.astype(wide) * b.astype(wide) >> wide.type(8 * a.dtype.itemsize)).astype(a.dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = bits_of(a), bits_of(b)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + (x0 * y0 >> half)
    high = x1 * y1 + (middle >> half) + (x0 * y1 + (middle & low) >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def multiply_wide(a: Array, b: Array) -> Array:
    """Whole products of twice the width."""
    wide = np.dtype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")
    return a.astype(wide) * b.astype(wide)


def highest_bit(a: Array) -> Array:
    """The place of the highest one, -1 if there is none; int64, of unsigned integers."""
    low = (a & a.dtype.type(0xFFFFFFFF)).astype(np.uint32).astype(np.float64)
    place = np.frexp(low)[1].astype(np.int64) - 1
    if a.dtype.itemsize == 8:
        high = (a >> np.uint64(32)).astype(np.float64)
        place = np.where(high > 0, np.frexp(high)[1] + 31, place)
    return place


def leading_zeros(a: Array) -> Array:
    """clz, uint32."""
    return (8 * a.dtype.itemsize - 1 - highest_bit(a)).astype(np.uint32)


def find_highest(a: Array, shift_amount: bool) -> Array:
    """bfind: the highest bit that is not the sign's; 0xffffffff if there is none."""
    unsigned = bits_of(np.where(a < 0, ~a, a))
    place = highest_bit(unsigned)
    found = 8 * a.dtype.itemsize - 1 - place if shift_amount else place
    return np.where(place < 0, 0xFFFFFFFF, found).astype(np.uint32)


def reversed_bits(a: Array) -> Array:
    """brev."""
    bits = np.unpackbits(a.view(np.uint8).reshape(len(a), -1), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(a.dtype).ravel()


def insert_field(a: Array, b: Array, first: Array, length: Array) -> Array:
    """bfi: `length` low bits of a take the place of b's from `first` on."""
    mask = shift_left(field_mask(a.dtype, length), first & np.uint32(255))
    return (b & ~mask) | (shift_left(a, first & np.uint32(255)) & mask)


def field_mask(dtype: np.dtype, length: Array) -> Array:
    """`length` ones, from the lowest bit on."""
    ones = np.full(length.shape, ~dtype.type(0), dtype)
    return ~shift_left(ones, length & np.uint32(255))


def permute_bytes(a: Array, b: Array, control: Array) -> Array:
    """prmt without a mode: each nibble of control picks one of eight bytes, or its sign eight times."""
    source = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(a)
    for i in range(4):
        nibble = control >> np.uint32(4 * i) & np.uint32(15)
        byte = (source >> (np.uint64(8) * (nibble & np.uint32(7)).astype(np.uint64)) & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte > 127, np.uint32(255), np.uint32(0))
        found |= np.where(nibble > 7, sign, byte) << np.uint32(8 * i)
    return found


# Of float64, then rounded to float32 once. The PTX ISA lets a GPU differ from that by about 2^-22 of the value (lg2 by
# that much near 1), so what is computed with them is compared with a tolerance, and equal bits say nothing of a GPU's.
APPROXIMATIONS: dict[str, Function] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
}


def approximation(name: str, ftz: bool) -> Function:
    """An .approx.f32 instruction."""
    exact = APPROXIMATIONS[name]

    def run(x: Array) -> Array:
        found = exact((flushed(x) if ftz else x).astype(np.float64)).astype(np.float32)
        return canonical(flushed(found) if ftz else found)

    return run


def coarse_reciprocal(x: Array) -> Array:
    """rcp.approx.ftz.f64: of the upper 32 bits, and only the upper 32 bits of the result."""
    upper = np.uint64(0xFFFFFFFF00000000)
    return flushed((bits_of(1.0 / flushed((bits_of(x) & upper).view(np.float64))) & upper).view(np.float64))


def float_function(name: str, kind: str, mode: str) -> Function | None:
    """add, sub, mul, fma, div, rcp, sqrt, min, max, neg, abs in a rounding mode; None: not implemented."""
    if name in ("min", "max", "neg", "abs"):
        return {"min": minimum, "max": maximum, "neg": negative, "abs": np.abs}[name]
    if kind == "f32":
        moded: dict[str, Function] = {
            "add": lambda a, b: rounding.add32(a, b, mode),
            "sub": lambda a, b: rounding.add32(a, negative(b), mode),
            "mul": lambda a, b: rounding.multiply32(a, b, mode),
            "fma": lambda a, b, c: rounding.fma32(a, b, c, mode),
        }
        if name in moded:
            return moded[name]
    exact: dict[str, Function] = {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "fma": rounding.fma64,
        "div": operator.truediv,
        "rcp": lambda a: a.dtype.type(1) / a,
        "sqrt": np.sqrt,
    }
    return exact[name] if mode == "rn" and name in exact else None


def compare(relation: str, kind: str) -> Function | None:
    """setp: the relations of a type; those that end in u hold where a float is NaN."""
    plain: dict[str, Function] = {
        "eq": operator.eq,
        "ne": operator.ne,
        "lt": operator.lt,
        "le": operator.le,
        "gt": operator.gt,
        "ge": operator.ge,
    }
    if kind.startswith("f"):
        if relation in ("ne", "num", "nan"):
            return None
        if relation.endswith("u") and relation[:-1] in plain:
            ordered = plain[relation[:-1]]
            return lambda a, b: ordered(a, b) | (a != a) | (b != b)
        return plain.get(relation)
    unsigned = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    if kind in BYTES and kind[0] == "u" and relation in unsigned:
        return plain[unsigned[relation]]
    return plain.get(relation)
