"""Instructions that compute from registers: arithmetic, logic, comparisons."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from tests.ops.cuda.ptx.interpreter import arithmetic as numbers
from tests.ops.cuda.ptx.interpreter.decoding import Decoder, Run, lift
from tests.ops.cuda.ptx.interpreter.program import BYTES, Vector

Array = np.ndarray
ROUNDINGS = ("rn", "rz", "rm", "rp")

_INTEGERS: dict[str, Callable[..., Array]] = {
    "add": operator.add,
    "sub": operator.sub,
    "min": np.minimum,
    "max": np.maximum,
    "div": numbers.divide,
    "rem": numbers.remainder,
    "neg": operator.neg,
    "abs": np.abs,
}
_LOGIC: dict[str, Callable[..., Array]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
}


def arithmetic(decoder: Decoder) -> Run:
    """add, sub, mul, fma, div, rem, min, max, neg, abs, rcp, sqrt, ex2, lg2, rsqrt."""
    kind = decoder.type()
    if not kind.startswith("f"):
        return _integers(decoder, kind)
    mode, ftz, approx = decoder.take(ROUNDINGS), decoder.take(("ftz",)), decoder.take(("approx",))
    saturate = decoder.take(("sat",))
    decoder.end(kind)
    function: Callable[..., Array] | None
    if approx and kind == "f32" and decoder.name in numbers.APPROXIMATIONS:
        function, ftz = numbers.approximation(decoder.name, bool(ftz)), ""
    elif approx and (decoder.name, kind, ftz) == ("rcp", "f64", "ftz"):
        function, ftz = numbers.coarse_reciprocal, ""
    elif approx or decoder.name in ("ex2", "lg2", "rsqrt"):
        raise decoder.unknown()
    else:
        function = numbers.float_function(decoder.name, kind, mode or "rn")
    if function is None or (saturate and kind != "f32") or kind not in ("f32", "f64"):
        raise decoder.unknown()
    found = function
    if kind == "f32" and decoder.name not in ("neg", "abs"):

        def whole(*values: Array) -> Array:
            result = numbers.canonical(found(*[numbers.flushed(v) for v in values] if ftz else values))
            result = numbers.flushed(result) if ftz else result
            return np.clip(np.where(np.isnan(result), np.float32(0), result), 0, 1) if saturate else result

        function = whole
    elif ftz or saturate:
        raise decoder.unknown()
    return lift(function, decoder.gets(kind), decoder.put(decoder.operands[0], kind))


def _integers(decoder: Decoder, kind: str) -> Run:
    part = decoder.take(("lo", "hi", "wide"))
    decoder.end(kind)
    name = decoder.name
    if (name == "mul") != bool(part):
        raise decoder.unknown()
    result = kind
    if name == "mul":
        function = {"lo": operator.mul, "hi": numbers.multiply_high, "wide": numbers.multiply_wide}[part]
        result = f"{kind[0]}{16 * BYTES[kind]}" if part == "wide" else kind
    elif name in _INTEGERS:
        function = _INTEGERS[name]
    else:
        raise decoder.unknown()
    return lift(function, decoder.gets(kind), decoder.put(decoder.operands[0], result))


def multiply_add(decoder: Decoder) -> Run:
    """mad.lo, mad.hi and mad.wide of integers."""
    kind, part = decoder.type(), decoder.take(("lo", "hi", "wide"))
    decoder.end(kind)
    if kind.startswith("f") or not part:
        raise decoder.unknown()
    product = {"lo": operator.mul, "hi": numbers.multiply_high, "wide": numbers.multiply_wide}[part]
    result = f"{kind[0]}{16 * BYTES[kind]}" if part == "wide" else kind
    decoder.expect(4)
    d, a, b, c = decoder.operands
    gets = [decoder.get(a, kind), decoder.get(b, kind), decoder.get(c, result)]
    return lift(lambda x, y, z: product(x, y) + z, gets, decoder.put(d, result))


def logic(decoder: Decoder) -> Run:
    """and, or, xor, not of bits and of predicates."""
    kind = decoder.type()
    decoder.end(kind)
    return lift(_LOGIC[decoder.name], decoder.gets(kind), decoder.put(decoder.operands[0], kind))


def shift(decoder: Decoder) -> Run:
    """shl and shr; the amount has 32 bits whatever the type."""
    kind = decoder.type()
    decoder.end(kind)
    decoder.expect(3)
    d, a, b = decoder.operands
    function = numbers.shift_left if decoder.name == "shl" else numbers.shift_right
    return lift(function, [decoder.get(a, kind), decoder.get(b, "u32")], decoder.put(d, kind))


def bits(decoder: Decoder) -> Run:
    """clz, popc, brev, bfind, bfi, prmt."""
    kind, name = decoder.type(), decoder.name
    amount = decoder.take(("shiftamt",))
    decoder.end(kind)
    if amount and name != "bfind":
        raise decoder.unknown()
    d, a, *rest = decoder.operands
    if name in ("clz", "popc", "bfind"):
        decoder.expect(2)
        function: Callable[..., Array] = {
            "clz": numbers.leading_zeros,
            "popc": lambda x: np.bitwise_count(x).astype(np.uint32),
            "bfind": lambda x: numbers.find_highest(x, bool(amount)),
        }[name]
        return lift(function, [decoder.get(a, kind)], decoder.put(d, "u32"))
    if name == "brev":
        return lift(numbers.reversed_bits, [decoder.get(a, kind)], decoder.put(d, kind))
    gets = [decoder.get(a, kind)]
    if name == "bfi":
        decoder.expect(5)
        gets += [decoder.get(rest[0], kind), *[decoder.get(each, "u32") for each in rest[1:]]]
        return lift(numbers.insert_field, gets, decoder.put(d, kind))
    decoder.expect(4)
    gets += [decoder.get(each, "u32") for each in rest]
    return lift(numbers.permute_bytes, gets, decoder.put(d, kind))


def move(decoder: Decoder) -> Run:
    """mov, also of several registers from or to one of their bits."""
    kind = decoder.type()
    decoder.end(kind)
    decoder.expect(2)
    d, a = decoder.operands
    if not isinstance(d, Vector) and not isinstance(a, Vector):
        return lift(lambda x: x, [decoder.get(a, kind)], decoder.put(d, kind))
    parts = d.parts if isinstance(d, Vector) else a.parts if isinstance(a, Vector) else ()
    size = BYTES[kind] // len(parts)
    each = f"u{8 * size}"
    if isinstance(d, Vector):
        get, puts = decoder.get(a, kind), [decoder.put(part, each) for part in parts]

        def split(group) -> None:
            pieces = get(group).view(f"u{size}").reshape(-1, len(puts))
            for i, put in enumerate(puts):
                put(group, pieces[:, i].copy())

        return split
    gets, put_whole = [decoder.get(part, each) for part in parts], decoder.put(d, kind)
    return lambda group: put_whole(group, np.stack([get(group) for get in gets], 1).view(f"u{BYTES[kind]}").ravel())


def select(decoder: Decoder) -> Run:
    """selp."""
    kind = decoder.type()
    decoder.end(kind)
    decoder.expect(4)
    d, a, b, p = decoder.operands
    gets = [decoder.get(p, "pred"), decoder.get(a, kind), decoder.get(b, kind)]
    return lift(np.where, gets, decoder.put(d, kind))


def set_predicate(decoder: Decoder) -> Run:
    """setp, also of two predicates p|q, and combined with a third one."""
    kind = decoder.type()
    combine, ftz = decoder.take(("and", "or", "xor")), decoder.take(("ftz",))
    relation = decoder.modifiers[0]
    decoder.end(relation, kind)
    function = numbers.compare(relation, kind)
    if function is None:
        raise decoder.unknown()
    decoder.expect(4 if combine else 3)
    target, a, b, *third = decoder.operands
    one, two = decoder.get(a, kind), decoder.get(b, kind)
    both = target.parts if isinstance(target, Vector) else (target,)
    puts = [decoder.put(part, "pred") for part in both]
    third_get = decoder.get(third[0], "pred") if third else None

    def run(group) -> None:
        x, y = one(group), two(group)
        if ftz:
            x, y = numbers.flushed(x), numbers.flushed(y)
        found = function(x, y)
        for put, value in zip(puts, (found, ~found), strict=False):
            put(group, value if third_get is None else _LOGIC[combine](value, third_get(group)))

    return run


TABLE: dict[str, Callable[[Decoder], Run]] = {
    **dict.fromkeys(("add", "sub", "mul", "fma", "div", "rem", "min", "max", "neg", "abs"), arithmetic),
    **dict.fromkeys(("rcp", "sqrt", "ex2", "lg2", "rsqrt"), arithmetic),
    **dict.fromkeys(("and", "or", "xor", "not"), logic),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("clz", "popc", "brev", "bfind", "bfi", "prmt"), bits),
    "mad": multiply_add,
    "mov": move,
    "selp": select,
    "setp": set_predicate,
}
