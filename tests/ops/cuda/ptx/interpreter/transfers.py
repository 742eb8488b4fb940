"""Instructions that touch memory: ld, st, atom, red, cvta, cp.async with its groups; and call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ops.cuda.ptx.interpreter.decoding import Decoder, Putter, Run, dtype_of, lift
from tests.ops.cuda.ptx.interpreter.group import Copies, Group
from tests.ops.cuda.ptx.interpreter.memory import LOCAL_WINDOW, SHARED_WINDOW
from tests.ops.cuda.ptx.interpreter.program import BYTES, Address, Operand, PtxError, Register, Symbol, Vector

Array = np.ndarray
SPACES = ("global", "shared", "shared::cta", "local", "param")
LOCAL_BYTES = 1 << 16  # between two threads' frames
_ORDERINGS = ("weak", "volatile", "relaxed", "acquire", "release")
_SCOPES = ("cta", "gpu", "sys", "cluster")
_CACHES = ("ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc")
_LEVELS = ("L1::evict_normal", "L1::evict_first", "L1::evict_last", "L1::no_allocate")
_PREFETCHES = ("L2::64B", "L2::128B", "L2::256B")


def _take_space(decoder: Decoder) -> str:
    return decoder.take(SPACES, "generic").removesuffix("::cta")


def _addresses(decoder: Decoder, index: int, space: str) -> Callable[[Group], Array]:
    """Generic addresses of the active threads."""
    get = decoder.address(decoder.operands[index], space)
    if space == "shared":
        return lambda group: get(group)[group.chosen()] + np.uint64(SHARED_WINDOW)
    if space == "local":
        frames = np.uint64(LOCAL_BYTES)
        return lambda group: (
            get(group)[group.chosen()]
            + group.threads[group.chosen()].astype(np.uint64) * frames
            + np.uint64(LOCAL_WINDOW)
        )
    return lambda group: get(group)[group.chosen()]


def _take_hints(decoder: Decoder) -> None:
    """Caches and orderings, which change no value where blocks run one after the other."""
    for hints in (_ORDERINGS, _SCOPES, _CACHES, _LEVELS, _PREFETCHES):
        decoder.take(hints)


def load(decoder: Decoder) -> Run:
    """ld of one, two or four entries; smaller types fill the register."""
    space, kind = _take_space(decoder), decoder.type()
    _take_hints(decoder)
    count = {"": 1, "v2": 2, "v4": 4}[decoder.take(("v2", "v4"))]
    decoder.end(kind)
    decoder.expect(2)
    target, source = decoder.operands
    targets = target.parts if isinstance(target, Vector) else (target,)
    if len(targets) != count:
        raise decoder.unknown()
    puts = [decoder.put(part, kind, widen=True) for part in targets]
    width, dtype = BYTES[kind], dtype_of(kind)
    if space == "param":
        return _load_parameter(decoder, source, puts, width)
    addresses = _addresses(decoder, 1, space)

    def run(group: Group) -> None:
        at = addresses(group)
        found = group.memory.load(at, width, count, space, group.threads[group.chosen()])
        for i, put in enumerate(puts):
            put(group, group.spread(np.ascontiguousarray(found[:, i])).view(dtype))

    return run


def _load_parameter(decoder: Decoder, source: Operand, puts: list[Putter], width: int) -> Run:
    if not isinstance(source, Address) or not isinstance(source.base, Symbol) or len(puts) != 1:
        raise decoder.unknown()
    first = decoder.parameter(source.base.name) + source.offset
    (put,) = puts

    def run(group: Group) -> None:
        value = int.from_bytes(group.launch.parameters[first : first + width], "little")
        put(group, np.full(len(group.threads), value, f"u{width}"))

    return run


def store(decoder: Decoder) -> Run:
    """st of one, two or four entries; the low bits of wider registers."""
    space, kind = _take_space(decoder), decoder.type()
    _take_hints(decoder)
    count = {"": 1, "v2": 2, "v4": 4}[decoder.take(("v2", "v4"))]
    decoder.end(kind)
    decoder.expect(2)
    source = decoder.operands[1]
    sources = source.parts if isinstance(source, Vector) else (source,)
    if space == "param":
        return _store_parameter(decoder, kind)
    if len(sources) != count:
        raise decoder.unknown()
    gets = [decoder.get(part, kind, narrow=True) for part in sources]
    addresses, bits = _addresses(decoder, 0, space), f"u{BYTES[kind]}"

    def run(group: Group) -> None:
        chosen = group.chosen()
        values = np.stack([get(group)[chosen].view(bits) for get in gets], 1)
        group.memory.store(addresses(group), values, space, group.threads[chosen])

    return run


def _store_parameter(decoder: Decoder, kind: str) -> Run:
    """A parameter of a call, which is a register here."""
    target, source = decoder.operands
    if not isinstance(target, Address) or not isinstance(target.base, Register) or target.offset:
        raise decoder.unknown()
    return lift(lambda x: x, [decoder.get(source, kind)], decoder.put(target.base, kind))


def call(decoder: Decoder) -> Run:
    """call of a function that the host gives, which takes integers and returns nothing, once for each thread."""
    decoder.take(("uni",))
    decoder.end()
    decoder.expect(2)
    function, parameters = decoder.operands
    if not isinstance(function, Symbol) or not isinstance(parameters, Vector):
        raise decoder.unknown()
    gets = [decoder.get(part, part.type) for part in parameters.parts if isinstance(part, Register)]
    if len(gets) != len(parameters.parts):
        raise decoder.unknown()

    def run(group: Group) -> None:
        if function.name not in group.launch.functions:
            raise PtxError(f"nobody says what {function.name} does")
        for values in zip(*[get(group)[group.chosen()].tolist() for get in gets], strict=True):
            group.launch.functions[function.name](*values)

    return run


def prefetch(decoder: Decoder) -> Run:
    """prefetch of a line of global memory, which changes nothing; here its address must be one that may be read."""
    space, level = _take_space(decoder), decoder.take(("L1", "L2"))
    decoder.end()
    decoder.expect(1)
    if space != "global" or not level:
        raise decoder.unknown()
    addresses = _addresses(decoder, 0, space)

    def run(group: Group) -> None:
        group.memory.load(addresses(group), 1, 1, space, group.threads[group.chosen()])

    return run


_ATOMS: dict[str, Callable] = {
    "add": lambda old, new: old + new,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
}


def atomic(decoder: Decoder) -> Run:
    """atom and red: one thread after the other, in their order; cas compares with the second operand."""
    space, kind = _take_space(decoder), decoder.type()
    _take_hints(decoder)
    name = decoder.take((*_ATOMS, "cas"))
    decoder.end(kind)
    returns, is_cas = decoder.name == "atom", name == "cas"
    if not name or space in ("param", "local"):
        raise decoder.unknown()
    decoder.expect(1 + returns + 1 + is_cas)
    put = decoder.put(decoder.operands[0], kind) if returns else None
    addresses = _addresses(decoder, int(returns), space)
    gets = [decoder.get(operand, kind) for operand in decoder.operands[1 + returns :]]
    dtype, width = dtype_of(kind), BYTES[kind]

    def run(group: Group) -> None:
        chosen = group.chosen()
        at, values = addresses(group), [get(group)[chosen] for get in gets]
        threads = group.threads[chosen]
        found = np.empty(len(at), dtype)
        for i in range(len(at)):
            one = slice(i, i + 1)
            old = group.memory.load(at[one], width, 1, space, threads[one]).view(dtype)[0]
            if is_cas:
                new = np.where(old == values[0][one], values[1][one], old)
            else:
                new = _ATOMS[name](old, values[0][one])
            found[i] = old[0]
            group.memory.store(at[one], new.view(f"u{width}")[:, None], space, threads[one])
        if put is not None:
            put(group, group.spread(found))

    return run


def convert_address(decoder: Decoder) -> Run:
    """cvta: between generic addresses and those of a state space."""
    to, kind = decoder.take(("to",)), decoder.type()
    space = _take_space(decoder)
    decoder.end(kind)
    decoder.expect(2)
    windows = {"global": 0, "shared": SHARED_WINDOW}
    if space not in windows or kind != "u64":
        raise decoder.unknown()
    window = np.uint64(windows[space])
    get, put = decoder.get(decoder.operands[1], kind), decoder.put(decoder.operands[0], kind)
    if to:
        return lambda group: put(group, get(group) - window)
    return lambda group: put(group, get(group) + window)


def copy_async(decoder: Decoder) -> Run:
    """cp.async and its groups. Bytes arrive when the thread waits for their group, and until then the target holds
    NaNs; or at once, in a launch with copies_early. What nobody waits for never arrives."""
    if decoder.take(("async",)) == "":
        raise decoder.unknown()
    if decoder.take(("commit_group",)):
        decoder.end()
        decoder.expect(0)
        return _commit
    if decoder.take(("wait_group",)):
        decoder.end()
        decoder.expect(1)
        num_open = decoder.constant(decoder.operands[0])
        return lambda group: _arrive(group, group.committed - num_open)
    if decoder.take(("wait_all",)):
        decoder.end()
        decoder.expect(0)
        return lambda group: _arrive(group, group.committed + 1)
    cache, _ = decoder.take(("ca", "cg")), decoder.take(_PREFETCHES)
    shared, source_space = decoder.take(("shared", "shared::cta")), decoder.take(("global",))
    decoder.end()
    decoder.expect(3, 4)
    width = decoder.constant(decoder.operands[2])
    if not (cache and shared and source_space) or width not in ((16,) if cache == "cg" else (4, 8, 16)):
        raise decoder.unknown()
    targets, sources = _addresses(decoder, 0, "shared"), _addresses(decoder, 1, "global")
    sizes = decoder.get(decoder.operands[3], "u32") if len(decoder.operands) == 4 else None

    def run(group: Group) -> None:
        chosen = group.chosen()
        to, threads = targets(group), group.threads[chosen]
        size = np.full(len(to), width) if sizes is None else sizes(group)[chosen].astype(np.int64)
        if (size > width).any():
            raise PtxError(f"a source of {size.max()} bytes for a copy of {width}")
        members, nothing = np.arange(len(group.threads))[chosen], np.zeros(len(to), bool)
        copies = Copies(members, to, sources(group), size, width, group.committed[chosen], nothing)
        values = _bytes_of(group, copies, size > 0)  # a bad address is found here
        if group.launch.copies_early:
            group.memory.store(to, values, "shared", threads)
        else:
            group.memory.store(to, np.full((len(to), width), 0xFF, np.uint8), "shared", threads)
            group.pending.append(copies)

    return run


def _bytes_of(group: Group, copies: Copies, chosen: Array) -> Array:
    """[copies, width] what is written: from the source as far as its size, then zeros."""
    found = np.zeros((len(copies.targets), copies.width), np.uint8)
    threads = group.threads[copies.members]
    if chosen.any():
        found[chosen] = group.memory.load(copies.sources[chosen], 1, copies.width, "global", threads[chosen])
    return np.where(np.arange(copies.width) < copies.sizes[:, None], found, 0).astype(np.uint8)


def _commit(group: Group) -> None:
    group.committed = group.committed + group.active()


def _arrive(group: Group, before: Array) -> None:
    """Write what the active threads copy in groups numbered below `before`."""
    active = group.active()
    for copies in group.pending:
        due = active[copies.members] & (copies.number < before[copies.members]) & ~copies.done
        if due.any():
            values = _bytes_of(group, copies, due & (copies.sizes > 0))
            threads = group.threads[copies.members]
            group.memory.store(copies.targets[due], values[due], "shared", threads[due])
            copies.done |= due
    group.pending = [copies for copies in group.pending if not copies.done.all()]


TABLE: dict[str, Callable[[Decoder], Run]] = {
    "ld": load,
    "st": store,
    "atom": atomic,
    "red": atomic,
    "cvta": convert_address,
    "prefetch": prefetch,
    "cp": copy_async,
    "call": call,
}
