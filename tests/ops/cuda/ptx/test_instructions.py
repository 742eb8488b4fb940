"""What single instructions compute, against Python's exact numbers."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from tests.ops.cuda.ptx.exact_numbers import FLOAT_EDGES, rounded, signed
from tests.ops.cuda.ptx.interpreter.program import PtxError
from tests.ops.cuda.ptx.snippet import interpret

INT_EDGES = [0, 1, 2, 3, 7, 31, 32, 33, 255, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xDEADBEEF, 0x12345678]


def whole_warps(rows: list[tuple]) -> list[tuple]:
    """As many rows as whole warps have threads."""
    return rows + rows[:1] * (-len(rows) % 32)


def pairs_of(edges, kind: str, seed: int = 0) -> list[np.ndarray]:
    """All pairs of edges and some random numbers."""
    rng = np.random.default_rng(seed)
    if kind[0] == "f":
        more = [tuple(row) for row in (rng.standard_normal((64, 2)) * 2.0 ** rng.integers(-30, 30, (64, 1))).tolist()]
    else:
        more = [tuple(row) for row in rng.integers(0, 1 << 32, (64, 2)).tolist()]
    rows = whole_warps([*itertools.product(edges, edges), *more])
    dtype = "u4" if kind[0] != "f" else kind
    with np.errstate(over="ignore"):
        return [np.array([row[i] for row in rows][:1024]).astype(dtype) for i in range(2)]


def c_division(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGER_PAIRS = {
    "add.s32 %d0, %a0, %a1;": lambda a, b: a + b,
    "sub.s32 %d0, %a0, %a1;": lambda a, b: a - b,
    "mul.lo.s32 %d0, %a0, %a1;": lambda a, b: a * b,
    "mul.hi.u32 %d0, %a0, %a1;": lambda a, b: a * b >> 32,
    "mul.hi.s32 %d0, %a0, %a1;": lambda a, b: signed(a) * signed(b) >> 32,
    "min.s32 %d0, %a0, %a1;": lambda a, b: min(signed(a), signed(b)),
    "max.u32 %d0, %a0, %a1;": max,
    "shl.b32 %d0, %a0, %a1;": lambda a, b: a << b if b < 32 else 0,
    "shr.u32 %d0, %a0, %a1;": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32 %d0, %a0, %a1;": lambda a, b: signed(a) >> min(b, 31),
    "not.b32 %d0, %a0;": lambda a, b: ~a,
    "neg.s32 %d0, %a0;": lambda a, b: -a,
    "abs.s32 %d0, %a0;": lambda a, b: abs(signed(a)),
    "clz.b32 %d0, %a0;": lambda a, b: 32 - a.bit_length(),
    "popc.b32 %d0, %a0;": lambda a, b: bin(a).count("1"),
    "brev.b32 %d0, %a0;": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %d0, %a0;": lambda a, b: a.bit_length() - 1,
    "bfind.shiftamt.u32 %d0, %a0;": lambda a, b: 32 - a.bit_length() if a else -1,
    "bfind.s32 %d0, %a0;": lambda a, b: (a if signed(a) >= 0 else ~a & 0xFFFFFFFF).bit_length() - 1,
    "mad.lo.s32 %d0, %a0, %a1, %a0;": lambda a, b: a * b + a,
    "and.b32 %d0, %a0, %a1;": lambda a, b: a & b,
    "xor.b32 %d0, %a0, -1;": lambda a, b: ~a,
    "shf.l.wrap.b32 %d0, %a0, %a1, %a0;": lambda a, b: ((b << 32 | a) << (a & 31)) >> 32,
    "shf.r.clamp.b32 %d0, %a0, %a1, %a1;": lambda a, b: (b << 32 | a) >> min(b, 32),
    "bfi.b32 %d0, %a0, %a1, 4, 28;": lambda a, b: (b & 0xF) | a << 4,
    "bfi.b32 %d0, %a0, %a1, 8, 0;": lambda a, b: b,
    "bfe.u32 %d0, %a0, 5, 9;": lambda a, b: a >> 5 & 511,
    "bfe.s32 %d0, %a0, 5, 9;": lambda a, b: signed(a >> 5 & 511, 9),
    "bfe.s32 %d0, %a0, 28, 9;": lambda a, b: signed(a) >> 28,
    "setp.lt.s32 %p0, %a0, %a1; selp.b32 %d0, 5, 9, %p0;": lambda a, b: 5 if signed(a) < signed(b) else 9,
    "setp.lt.u32 %p0, %a0, %a1; selp.b32 %d0, 5, 9, %p0;": lambda a, b: 5 if a < b else 9,
    "setp.hs.u32 %p0|%p1, %a0, %a1; selp.b32 %d0, 5, 9, %p1;": lambda a, b: 5 if a < b else 9,
    "setp.eq.s32 %p0, %a0, 3; setp.lt.or.s32 %p1, %a1, 3, %p0; selp.b32 %d0, 1, 0, %p1;": lambda a, b: (
        a == 3 or signed(b) < 3
    ),
}


@pytest.mark.parametrize("text", INTEGER_PAIRS)
def test_integers_of_32_bits(text):
    a, b = pairs_of(INT_EDGES, "u4")
    (found,) = interpret(text, [a, b])
    wanted = [int(INTEGER_PAIRS[text](x, y)) & 0xFFFFFFFF for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert found.tolist() == wanted


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_division_is_toward_zero(kind):
    a, b = pairs_of([value for value in INT_EDGES if value], "u4")
    quotient, rest = interpret(f"div.{kind} %d0, %a0, %a1; rem.{kind} %d1, %a0, %a1;", [a, b], ("u4", "u4"))
    for x, y, q, r in zip(a.tolist(), b.tolist(), quotient.tolist(), rest.tolist(), strict=True):
        x, y = (signed(x), signed(y)) if kind == "s32" else (x, y)
        wanted = c_division(x, y)
        assert (q, r) == (wanted & 0xFFFFFFFF, x - wanted * y & 0xFFFFFFFF)


WIDE = {
    "mul.wide.s32 %d0, %a0, %a1;": lambda a, b: signed(a) * signed(b),
    "mad.wide.u32 %d0, %a0, %a1, %y0;": lambda a, b: a * b + signed(a) + (b << 32),
    "mul.lo.s64 %d0, %y0, %y1;": lambda a, b: (signed(a) + (b << 32)) * (b << 1 | a >> 31),
    "mul.hi.u64 %d0, %y0, %y1;": lambda a, b: ((signed(a) + (b << 32)) % 2**64) * (b << 1 | a >> 31) >> 64,
    "mul.hi.s64 %d0, %y0, %y1;": lambda a, b: signed((signed(a) + (b << 32)) % 2**64, 64) * (b << 1 | a >> 31) >> 64,
    "shr.s64 %d0, %y0, %a1;": lambda a, b: signed((signed(a) + (b << 32)) % 2**64, 64) >> min(b, 63),
    "clz.b64 %x0, %y0; cvt.u64.u32 %d0, %x0;": lambda a, b: 64 - ((signed(a) + (b << 32)) % 2**64).bit_length(),
    "bfi.b64 %d0, %y1, %y0, 32, 32;": lambda a, b: signed(a) % 2**32 + ((b << 1 | a >> 31) << 32),
    "mov.b64 {%x0, %x1}, %y0; mov.b64 %d0, {%x1, %x0};": lambda a, b: (
        ((signed(a) + (b << 32)) % 2**64 >> 32) + ((signed(a) + (b << 32)) % 2**32 << 32)
    ),
    "cvt.s64.s32 %d0, %a0;": lambda a, b: signed(a),
    "cvt.u32.u64 %x0, %y0; cvt.u64.u32 %d0, %x0;": lambda a, b: a,
    "sub.s64 %d0, %y0, %y1;": lambda a, b: signed(a) + (b << 32) - (b << 1 | a >> 31),
}
OPERANDS_OF_64_BITS = """
cvt.s64.s32 %y0, %a0; cvt.u64.u32 %y1, %a1; shl.b64 %y2, %y1, 32; add.s64 %y0, %y0, %y2;
shl.b64 %y1, %y1, 1; shr.u32 %x9, %a0, 31; cvt.u64.u32 %y2, %x9; or.b64 %y1, %y1, %y2;
"""


@pytest.mark.parametrize("text", WIDE)
def test_integers_of_64_bits(text):
    """%y0 is a with its sign plus b 2^32, %y1 is 2 b and the sign of a."""
    a, b = pairs_of(INT_EDGES, "u4")
    (found,) = interpret(OPERANDS_OF_64_BITS + text, [a, b], ("u8",))
    wanted = [int(WIDE[text](x, y)) & (1 << 64) - 1 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert found.tolist() == wanted


def test_permuted_bytes():
    """prmt as the PTX ISA numbers bytes: {b, a} from 7 to 0, a selector's top bit spreads the byte's sign."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(0, 1 << 32, 256, dtype=np.uint64).astype(np.uint32) for _ in range(3))
    (found,) = interpret("prmt.b32 %d0, %a0, %a1, %a2;", [a, b, c])
    for x, y, control, value in zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True):
        source = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        picked = []
        for place in range(4):
            selector = control >> 4 * place & 15
            byte = source[selector & 7]
            picked.append((255 if byte & 128 else 0) if selector & 8 else byte)
        assert value == int.from_bytes(bytes(picked), "little")
    (halves,) = interpret("prmt.b32 %d0, %a0, %a1, 0x5410;", [a, b])
    assert halves.tolist() == ((b << 16) | (a & 0xFFFF)).tolist()


def test_a_table_of_three_inputs():
    """lop3: the table of a function is that function of 0xF0, 0xCC and 0xAA."""
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32) for _ in range(3))
    for law in (lambda x, y, z: x & y ^ z, lambda x, y, z: (x & y) | (~x & z), lambda x, y, z: ~(x | y | z)):
        table = law(0xF0, 0xCC, 0xAA) & 255
        (found,) = interpret(f"lop3.b32 %d0, %a0, %a1, %a2, {table};", [a, b, c])
        assert found.tolist() == law(a, b, c).tolist()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_sums_and_products_are_rounded_once(mode):
    """Half of the products end close to the middle between two floats, where a second rounding shows."""
    rng = np.random.default_rng(2)
    a = rng.standard_normal(512).astype(np.float32)
    b = (rng.standard_normal(512) * 2.0 ** rng.integers(-20, 20, 512)).astype(np.float32)
    c = (-a * b * np.float32(2) ** rng.integers(-3, 30, 512).astype(np.float32)).astype(np.float32)
    c[::2] = np.float32(1.0)
    a[::2], b[::2] = np.float32(1 + 2.0**-12), np.float32(2.0**-24) * (1 + 2.0 ** -rng.integers(10, 24, 256))
    text = f"fma.{mode}.f32 %d0, %a0, %a1, %a2; add.{mode}.f32 %d1, %a1, %a2; mul.{mode}.f32 %d2, %a0, %a1;"
    found = interpret(text, [a, b, c], ("f4", "f4", "f4"))
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        x, y, z = Fraction(x), Fraction(y), Fraction(z)
        for output, exact in zip(found, (x * y + z, y + z, x * y), strict=True):
            if exact:
                assert output[i] == rounded(exact, mode), (mode, i, float(exact))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_nothing_has_the_sign_of_its_rounding(mode):
    a = np.array([1.5, -1.5, 0.0, -0.0] * 8, np.float32)
    (found,) = interpret(
        f"add.{mode}.f32 %d0, %a0, %a1;", [a, np.array([-1.5, 1.5, 0.0, -0.0] * 8, np.float32)], ("f4",)
    )
    assert (found == 0).all()
    assert np.signbit(found[:4]).tolist() == [mode == "rm", mode == "rm", False, True]


def test_float64_is_fused_and_exact():
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal(64), rng.standard_normal(64)
    c = -a * b
    text = "fma.rn.f64 %d0, %a0, %a1, %a2; div.rn.f64 %d1, %a0, %a1; sqrt.rn.f64 %d2, %a3; cvt.rn.f32.f64 %x0, %a0;"
    fused, quotient, root, narrow = interpret(text + "mov.b32 %d3, %x0;", [a, b, c, a * a], ("f8", "f8", "f8", "f4"))
    exact = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert fused.tolist() == exact
    assert any(exact), "what a product lost when it was rounded"
    assert quotient.tolist() == (a / b).tolist()
    assert root.tolist() == np.abs(a).tolist()
    assert narrow.tolist() == a.astype(np.float32).tolist()


def test_a_coarse_reciprocal_refines_to_a_quotient():
    """rcp.approx.ftz.f64 has 20 bits and more, and nothing in its lower half, as the refinement after it expects."""
    x = np.array([1.0, 3.0, -7.5, 1e300, 1e-300, 0.1, math.inf, 0.0] * 4)
    (found,) = interpret("rcp.approx.ftz.f64 %d0, %a0;", [x], ("f8",))
    assert not (found.view(np.uint64) & np.uint64(0xFFFFFFFF)).any()
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(found, 1 / x, rtol=2**-19)


def test_floats_of_special_values():
    a, b = pairs_of(FLOAT_EDGES, "f4")
    text = "min.f32 %d0, %a0, %a1; max.f32 %d1, %a0, %a1; add.f32 %d2, %a0, %a1; abs.f32 %d3, %a0; neg.f32 %d4, %a0;"
    low, high, total, size, other = interpret(text, [a, b], ("u4",) * 5)
    for x, y, *bits in zip(a, b, low, high, total, size, other, strict=True):
        least, most, added, positive, negative = (np.uint32(each).view(np.float32) for each in bits)
        if np.isnan(x) or np.isnan(y):
            number = y if np.isnan(x) else x
            assert np.isnan(least) if np.isnan(number) else least == number == most
            assert bits[2] == 0x7FFFFFFF, "no payload"
        elif x == y == 0:
            assert np.signbit(least) == (np.signbit(x) or np.signbit(y))
            assert np.signbit(most) == (np.signbit(x) and np.signbit(y))
        else:
            assert (least, most) == (min(x, y), max(x, y))
            with np.errstate(invalid="ignore", over="ignore"):
                assert added == x + y or np.isnan(x + y)
        if not np.isnan(x):
            assert positive == abs(x)
            assert np.signbit(negative) != np.signbit(x)


RELATIONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b and a == a and b == b,
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: a == b or a != a or b != b,
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: not a >= b,
    "leu": lambda a, b: not a > b,
    "gtu": lambda a, b: not a <= b,
    "geu": lambda a, b: not a < b,
    "num": lambda a, b: a == a and b == b,
    "nan": lambda a, b: a != a or b != b,
}


@pytest.mark.parametrize("relation", RELATIONS)
def test_comparisons_of_floats(relation):
    a, b = pairs_of(FLOAT_EDGES, "f4")
    (found,) = interpret(f"setp.{relation}.f32 %p0, %a0, %a1; selp.u32 %d0, 1, 0, %p0;", [a, b])
    assert found.tolist() == [int(RELATIONS[relation](x, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize("value", [0, 1])
def test_guards_and_predicates(value):
    x = np.arange(32, dtype=np.uint32)
    text = f"""
    mov.pred %p1, {-value}; mov.u32 %d0, 7; setp.lt.u32 %p0, %a0, 16; @%p0 mov.u32 %d0, 8; @!%p0 add.u32 %d0, %d0, 2;
    xor.pred %p2, %p0, %p1; not.pred %p3, %p2; selp.u32 %d1, 1, 0, %p3;
    mov.u32 %d2, 1; @!%p0 bra UPPER; mov.u32 %d2, 0; UPPER: mov.u32 %x0, 0;"""
    chosen, other, upper = interpret(text, [x], ("u4", "u4", "u4"))
    assert upper.tolist() == [0] * 16 + [1] * 16
    assert chosen.tolist() == [8] * 16 + [9] * 16
    assert other.tolist() == [int((i < 16) == bool(value)) for i in range(32)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frobnicate.b32 %d0, %a0;", "line 20: frobnicate.b32 %d0, %a0: this instruction is unknown here"),
        ("add.rn.f16 %d0, %a0, %a0;", "this instruction is unknown here"),
        ("add.sideways.s32 %d0, %a0, %a0;", "this instruction is unknown here"),
        ("mul.s32 %d0, %a0, %a0;", "this instruction is unknown here"),
        ("add.s64 %d0, %a0, %a0;", "a register of 32 bits does not fit .s64"),
        ("and.pred %p0, %a0, %p0;", "a predicate and a number are confused"),
        ("mov.u32 %d0, %nope;", "register %nope is not declared"),
        ("mov.u32 %d0, %smid.x;", "special register %smid.x is unknown"),
        ("bra NOWHERE;", "the label is missing"),
        ("add.s32 %d0, %x7, 1;", "thread 0 reads %x7, which it has not written"),
        ("setp.lt.u32 %p0, %t, 5; @%p0 mov.u32 %x1, 1; add.s32 %d0, %x1, 1;", "thread 5 reads %x1"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, message):
    with pytest.raises(PtxError) as raised:
        interpret(text, [np.arange(32, dtype=np.uint32)])
    assert message in str(raised.value)
