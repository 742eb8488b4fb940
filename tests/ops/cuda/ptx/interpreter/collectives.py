"""Instructions of a whole warp or block: shfl, vote, mma, ldmatrix, barriers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.ops.cuda.ptx.interpreter import rounding
from tests.ops.cuda.ptx.interpreter.decoding import STOP, Decoder, Run
from tests.ops.cuda.ptx.interpreter.group import LANES, Barrier, Group
from tests.ops.cuda.ptx.interpreter.memory import SHARED_WINDOW
from tests.ops.cuda.ptx.interpreter.program import Operand, PtxError, Vector

Array = np.ndarray
LANE = np.arange(LANES)


def _gather_members(group: Group, pc: int, masks: Array) -> bool:
    """Gather the lanes that the threads' member masks name, as Group.gather_warps does."""
    if group.mask is None and (masks == np.uint32(0xFFFFFFFF)).all():
        return True
    active = group.active()
    lanes = np.tile(LANE, len(active) // LANES).astype(np.uint32)
    if (active & (masks >> lanes & np.uint32(1) == 0)).any():
        raise PtxError("a thread that its own member mask leaves out")
    warps, in_use = masks.reshape(-1, LANES), active.reshape(-1, LANES)
    first = warps[np.arange(len(warps)), in_use.argmax(1)]
    if ((warps != first[:, None]) & in_use).any():
        raise PtxError("threads of a warp that give different member masks")
    needed = (first[:, None] >> LANE.astype(np.uint32) & np.uint32(1)).astype(bool) & in_use.any(1)[:, None]
    return group.gather_warps(pc, needed.ravel())


def _gather_whole_warps(group: Group, pc: int) -> bool:
    """Gather whole warps, of which no thread has ended, as Group.gather_warps does."""
    return group.mask is None or group.gather_warps(pc, np.ones(len(group.threads), bool))


def shuffle(decoder: Decoder) -> Run:
    """shfl.sync: up, down, bfly and idx, with the clamp and the segments of operand c."""
    decoder.take(("sync",))
    mode = decoder.take(("up", "down", "bfly", "idx"))
    decoder.end("b32")
    decoder.expect(5)
    target, *operands = decoder.operands
    results = target.parts if isinstance(target, Vector) else (target,)
    put = decoder.put(results[0], "b32")
    put_valid = decoder.put(results[1], "pred") if len(results) > 1 else None
    value, amount, control, members = (decoder.get(operand, "b32") for operand in operands)
    pc = decoder.pc

    def run(group: Group) -> int | None:
        if not _gather_members(group, pc, members(group)):
            return STOP
        count = len(group.threads)
        lane = np.tile(LANE, count // LANES)
        b, c = (amount(group) & 31).astype(np.int64), control(group).astype(np.int64)
        clamp, segments = c & 31, c >> 8 & 31
        lowest, highest = lane & segments, (lane & segments) | (clamp & ~segments)
        if mode == "up":
            source, valid = lane - b, lane - b >= highest
        elif mode == "idx":
            source = lowest | (b & ~segments)
            valid = source <= highest
        else:
            source = lane + b if mode == "down" else lane ^ b
            valid = source <= highest
        at = np.arange(count) - lane + np.where(valid, source, lane)
        active = group.active()
        if (active & ~active[at]).any():
            raise PtxError("a value is taken from a lane that does not take part")
        put(group, value(group)[at])
        if put_valid is not None:
            put_valid(group, valid)
        return None

    return run


def vote(decoder: Decoder) -> Run:
    """vote.sync: ballot, any, all."""
    decoder.take(("sync",))
    mode = decoder.take(("ballot", "any", "all"))
    kind = "b32" if mode == "ballot" else "pred"
    if not mode:
        raise decoder.unknown()
    decoder.end(kind)
    decoder.expect(3)
    put = decoder.put(decoder.operands[0], kind)
    predicate, members = decoder.get(decoder.operands[1], "pred"), decoder.get(decoder.operands[2], "b32")
    pc = decoder.pc

    def run(group: Group) -> int | None:
        if not _gather_members(group, pc, members(group)):
            return STOP
        active = group.active().reshape(-1, LANES)
        holds = predicate(group).reshape(-1, LANES)
        if mode == "ballot":
            found = ((holds & active).astype(np.uint64) << LANE.astype(np.uint64)).sum(1).astype(np.uint32)
        elif mode == "any":
            found = (holds & active).any(1)
        else:
            found = (holds | ~active).all(1)
        put(group, np.repeat(found, LANES))
        return None

    return run


def _parts(decoder: Decoder, operand: Operand, count: int) -> tuple[Operand, ...]:
    if not isinstance(operand, Vector) or len(operand.parts) != count:
        raise decoder.unknown()
    return operand.parts


# Of m16n8k16 in the terms of the PTX ISA: group = lane / 4, index = lane % 4. Entry i of a lane's A, B and C.
_GROUP, _INDEX = LANE[:, None] >> 2, LANE[:, None] & 3
_A_ENTRY, _B_ENTRY, _C_ENTRY = np.arange(8), np.arange(4), np.arange(4)
A_ROW = np.where((_A_ENTRY < 2) | ((_A_ENTRY >= 4) & (_A_ENTRY < 6)), _GROUP, _GROUP + 8)
A_COLUMN = np.where(_A_ENTRY < 4, _INDEX * 2 + (_A_ENTRY & 1), _INDEX * 2 + (_A_ENTRY & 1) + 8)
B_ROW = np.where(_B_ENTRY < 2, _INDEX * 2 + (_B_ENTRY & 1), _INDEX * 2 + (_B_ENTRY & 1) + 8)
B_COLUMN = np.broadcast_to(_GROUP, (LANES, 4))
C_ROW = np.where(_C_ENTRY < 2, _GROUP, _GROUP + 8)
C_COLUMN = _INDEX * 2 + (_C_ENTRY & 1)


def multiply_matrices(decoder: Decoder) -> Run:
    """mma.m16n8k16 of bf16 or f16 with float32 sums: products are added in float64, in order, and rounded once.

    A GPU adds in an order and with a width of its own, so its results differ in the last bits.
    """
    shape = decoder.take(("m16n8k16",))
    for modifier in ("sync", "aligned"):
        if not decoder.take((modifier,)):
            raise decoder.unknown()
    kind = decoder.modifiers[3] if len(decoder.modifiers) == 6 else ""
    decoder.end("row", "col", "f32", kind, kind, "f32")
    decoder.expect(4)
    if not shape or kind not in ("bf16", "f16"):
        raise decoder.unknown()
    d, a, b, c = decoder.operands
    puts = [decoder.put(part, "f32") for part in _parts(decoder, d, 4)]
    gets_a = [decoder.get(part, "b32") for part in _parts(decoder, a, 4)]
    gets_b = [decoder.get(part, "b32") for part in _parts(decoder, b, 2)]
    gets_c = [decoder.get(part, "f32") for part in _parts(decoder, c, 4)]
    pc = decoder.pc

    def entries(group: Group, gets) -> Array:
        """[warps, lanes, entries] of packed pairs, as float64: the low half comes first."""
        pairs = np.stack([get(group) for get in gets], 1).view(np.uint16)
        values = rounding.from_bf16(pairs) if kind == "bf16" else pairs.view(np.float16)
        return values.astype(np.float64).reshape(-1, LANES, 2 * len(gets))

    def run(group: Group) -> int | None:
        if not _gather_whole_warps(group, pc):
            return STOP
        num_warps = len(group.threads) // LANES
        left, right = np.empty((num_warps, 16, 16)), np.empty((num_warps, 16, 8))
        left[:, A_ROW, A_COLUMN] = entries(group, gets_a)
        right[:, B_ROW, B_COLUMN] = entries(group, gets_b)
        # numpy adds along the first axis one by one.
        products = left.transpose(2, 0, 1)[:, :, :, None] * right.transpose(1, 0, 2)[:, :, None, :]
        total = products.sum(0)
        added = np.stack([get(group) for get in gets_c], 1).reshape(-1, LANES, 4)
        found = (added + total[:, C_ROW, C_COLUMN]).astype(np.float32).reshape(-1, 4)
        for i, put in enumerate(puts):
            put(group, found[:, i].copy())
        return None

    return run


def load_matrices(decoder: Decoder) -> Run:
    """ldmatrix.m8n8 of one, two or four matrices of 16-bit entries, as they are or transposed."""
    for modifier in ("sync", "aligned", "m8n8"):
        if not decoder.take((modifier,)):
            raise decoder.unknown()
    count = {"x1": 1, "x2": 2, "x4": 4}.get(decoder.take(("x1", "x2", "x4")), 0)
    transposed, shared = decoder.take(("trans",)), decoder.take(("shared", "shared::cta"))
    decoder.end("b16")
    decoder.expect(2)
    if not count or not shared:
        raise decoder.unknown()
    puts = [decoder.put(part, "b32") for part in _parts(decoder, decoder.operands[0], count)]
    address = decoder.address(decoder.operands[1], "shared")
    pc = decoder.pc

    def run(group: Group) -> int | None:
        if not _gather_whole_warps(group, pc):
            return STOP
        # Lanes 8m to 8m + 7 say where the rows of matrix m are; what the others say is ignored.
        speaks = np.tile(8 * count > LANE, len(group.threads) // LANES) & group.active()
        at = address(group)[speaks] + np.uint64(SHARED_WINDOW)
        rows = group.memory.load(at, 2, 8, "shared", group.threads[speaks]).reshape(-1, count, 8, 8)
        if transposed:
            rows = rows.swapaxes(2, 3)
        pairs = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, count, LANES)
        for i, put in enumerate(puts):
            put(group, group.spread(np.ascontiguousarray(pairs[:, i]).ravel()))
        return None

    return run


def barrier(decoder: Decoder) -> Run:
    """bar.sync and bar.red.or/and/popc of all threads of the block, bar.warp.sync of a warp's."""
    pc = decoder.pc
    if decoder.take(("warp",)):
        decoder.end("sync")
        members = decoder.get(decoder.operands[0], "b32")
        return lambda group: None if _gather_members(group, pc, members(group)) else STOP
    reduce = decoder.take(("red",)) and decoder.take(("or", "and", "popc"))
    kind = {"": "", "popc": "u32"}.get(reduce, "pred")
    decoder.end(*([kind] if reduce else ["sync"]))
    decoder.expect(3 if reduce else 1)
    if decoder.constant(decoder.operands[1 if reduce else 0]) != 0:
        raise decoder.unknown()
    slot = decoder.place_of(decoder.operands[0]) if reduce else -1
    votes = decoder.get(decoder.operands[2], "pred") if reduce else None

    def run(group: Group) -> int:
        if not group.gather_warps(pc):
            return STOP
        active = group.active()
        if group.barrier is not None and group.barrier.pc != pc:
            raise PtxError("threads of a block that wait at different barriers")
        # Threads that came before still hold what they voted with.
        group.barrier = Barrier(pc, reduce, slot, votes(group) if votes is not None else active)
        group.waiting |= active
        group.pcs[active] = pc + 1
        return STOP

    return run


def fence(decoder: Decoder) -> Run:
    """membar and fence: threads of this interpreter see each other's writes at once."""
    return lambda group: None


TABLE: dict[str, Callable[[Decoder], Run]] = {
    "shfl": shuffle,
    "vote": vote,
    "mma": multiply_matrices,
    "ldmatrix": load_matrices,
    "bar": barrier,
    "membar": fence,
    "fence": fence,
}
