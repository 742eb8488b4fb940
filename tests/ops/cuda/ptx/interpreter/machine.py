"""Runs a kernel of a PTX text: a launch block by block, a block's threads in groups that execute together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.ops.cuda.ptx.interpreter import collectives, compute, conversions, transfers
from tests.ops.cuda.ptx.interpreter.decoding import STOP, Decoder, Operation, Run, Symbols
from tests.ops.cuda.ptx.interpreter.group import LANES, Group, Launch, Slots
from tests.ops.cuda.ptx.interpreter.memory import BORDER, LOCAL_WINDOW, SHARED_WINDOW, Memory
from tests.ops.cuda.ptx.interpreter.program import Kernel, Program, PtxError

MAX_STEPS = 10_000_000  # instructions of a group in one block; more is a kernel that does not end


def branch(decoder: Decoder) -> Run:
    """bra, with a predicate that may part the threads."""
    decoder.take(("uni",))
    decoder.end()
    decoder.expect(1)
    target, pc, guard = decoder.label(decoder.operands[0]), decoder.pc, decoder.instruction.guard
    if guard is None:
        return lambda group: target
    predicate, negated = decoder.get(guard[0], "pred"), guard[1]

    def run(group: Group) -> int | None:
        taken = predicate(group) ^ negated
        if group.mask is not None:
            taken = taken & group.mask
        number, of = np.count_nonzero(taken), len(taken) if group.mask is None else np.count_nonzero(group.mask)
        if number == of:
            return target
        if number == 0:
            return None
        group.pcs[group.active()] = pc + 1
        group.pcs[taken] = target
        return STOP

    return run


def leave(decoder: Decoder) -> Run:
    """ret and exit of a kernel."""
    decoder.take(("uni",))
    decoder.end()
    decoder.expect(0)

    def run(group: Group) -> int:
        group.alive &= ~group.active()
        return STOP

    return run


TABLE: dict[str, Callable[[Decoder], Run]] = {
    **compute.TABLE,
    **conversions.TABLE,
    **transfers.TABLE,
    **collectives.TABLE,
    "ret": leave,
    "exit": leave,
}


@dataclass
class Code:
    """A kernel ready to run; parameter_offsets are (first byte, bytes)."""

    kernel: Kernel
    operations: list[Operation]
    slots: Slots
    parameter_offsets: list[tuple[int, int]]

    def variables(self, num_threads: int) -> list[tuple[str, int, int]]:
        """(space, generic address, bytes) of a block of so many threads."""
        symbols = _addresses(self.kernel)
        found = []
        for name, variable in self.kernel.variables.items():
            if variable.space == "global":
                continue
            if variable.space == "shared":
                found.append(("shared", SHARED_WINDOW + symbols[name], variable.size))
            else:
                starts = [LOCAL_WINDOW + t * transfers.LOCAL_BYTES + symbols[name] for t in range(num_threads)]
                found += [("local", start, variable.size) for start in starts]
        return found


def _addresses(kernel: Kernel) -> dict[str, int]:
    """Offsets of variables in their state spaces: borders between them, and no better aligned than they ask for. Global
    ones have addresses."""
    found, used = {}, {"shared": BORDER, "local": BORDER}
    for name, variable in kernel.variables.items():
        if variable.memory is not None:
            found[name] = variable.memory.ctypes.data
            continue
        multiple = -(-used[variable.space] // variable.alignment) | 1
        found[name] = multiple * variable.alignment
        used[variable.space] = found[name] + variable.size + BORDER
    return found


def decode(kernel: Kernel) -> Code:
    """PtxError names the line of what is unknown here."""
    offsets, end = [], 0
    for _, size in kernel.parameters:
        start = -(-end // size) * size
        offsets.append((start, size))
        end = start + size
    parameters = {name: start for (name, _), (start, _) in zip(kernel.parameters, offsets, strict=True)}
    symbols, slots = Symbols(_addresses(kernel), parameters, kernel.labels), Slots()
    operations = []
    for pc, instruction in enumerate(kernel.instructions):
        decoder = Decoder(slots, instruction, pc, symbols)
        if decoder.name == "bra":
            run = branch(decoder)
        elif decoder.name not in TABLE:
            raise decoder.unknown()
        else:
            run = TABLE[decoder.name](decoder)
            if instruction.guard is not None:
                run = _guarded(decoder, run)
        operations.append(Operation(run, frozenset(decoder.sources), instruction))
    return Code(kernel, operations, slots, offsets)


def _guarded(decoder: Decoder, run: Run) -> Run:
    """Limit `run` to active threads whose predicate holds; collectives and ends are only known without a predicate."""
    if decoder.name in collectives.TABLE or decoder.name in ("ret", "exit", "call"):
        raise decoder.unknown()
    register, negated = decoder.instruction.guard  # type: ignore[misc]
    predicate = decoder.get(register, "pred")

    def guarded(group: Group) -> int | None:
        before = group.mask
        group.mask = group.active() & (predicate(group) ^ negated)
        if group.mask.any():
            run(group)
        group.mask = before
        return None

    return guarded


class Machine:
    """Kernels of a text over a memory.

    warps_apart: None runs all threads of a block together, instruction by instruction; 1 runs warp after warp as far as
    each gets, -1 from the last warp on, so that a missing barrier shows. copies_early: bytes of cp.async arrive at once
    and not when they are waited for. max_steps: instructions after which a block is given up. functions: what extern
    functions do, of integers.
    """

    def __init__(
        self,
        program: Program,
        memory: Memory,
        *,
        warps_apart: int | None = None,
        copies_early: bool = False,
        max_steps: int = MAX_STEPS,
        functions: Mapping[str, Callable[..., None]] | None = None,
    ) -> None:
        self._program, self._memory, self._warps_apart = program, memory, warps_apart
        self._copies_early, self._max_steps = copies_early, max_steps
        self._functions = functions or {}
        self._codes: dict[str, Code] = {}

    def code(self, kernel: str) -> Code:
        """A kernel, decoded once."""
        if kernel not in self._codes:
            self._codes[kernel] = decode(self._program.kernel(kernel))
            for variable in self._codes[kernel].kernel.variables.values():
                if variable.memory is not None:
                    self._memory.add_array(variable.memory)
        return self._codes[kernel]

    def launch(
        self, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: Sequence[int]
    ) -> None:
        """arguments: integers, of which each takes the bytes of its parameter."""
        code = self.code(kernel)
        if len(arguments) != len(code.parameter_offsets):
            raise PtxError(f"{kernel} has {len(code.parameter_offsets)} parameters, not {len(arguments)}")
        parameters = bytearray(sum(code.parameter_offsets[-1]) if arguments else 0)
        for value, (start, size) in zip(arguments, code.parameter_offsets, strict=True):
            parameters[start : start + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        launch = Launch(grid, block, bytes(parameters), self._copies_early, self._max_steps, self._functions)
        for z, y, x in np.ndindex(grid[2], grid[1], grid[0]):
            try:
                with np.errstate(all="ignore"):
                    self._run_block(code, launch, (x, y, z))
            except PtxError as error:
                raise PtxError(f"{kernel}, block ({x}, {y}, {z}): {error}") from error

    def _run_block(self, code: Code, launch: Launch, block: tuple[int, int, int]) -> None:
        num_threads = -(-launch.num_threads // LANES) * LANES
        memory = self._memory.with_block(code.variables(num_threads))
        threads = np.arange(num_threads)
        parts = (
            [threads] if self._warps_apart is None else np.split(threads, num_threads // LANES)[:: self._warps_apart]
        )
        groups = [Group(code.slots, part, launch, block, memory) for part in parts]
        while groups:
            for group in groups:
                run_group(code.operations, group)
            groups = [group for group in groups if group.alive.any()]
            if groups:
                _release(groups, code.operations)


def run_group(operations: list[Operation], group: Group) -> None:
    """Until all threads of the group wait at a barrier, are stuck or have ended."""
    steps = 0
    while (found := group.choose()) is not None:
        pc, limit = found
        undefined = group.undefined
        while True:
            operation = operations[pc]
            try:
                if not operation.sources.isdisjoint(undefined):
                    group.check_defined(operation.sources)
                target = operation.run(group)
            except PtxError as error:
                raise operation.instruction.error(str(error)) from error
            steps += 1
            if steps > group.launch.max_steps:
                raise operation.instruction.error(f"the block has not ended after {steps} instructions")
            if target == STOP:
                break
            if target is None:
                pc += 1
            elif group.is_alone:
                pc = target
                continue
            else:
                group.pcs[group.active()] = target
                break
            if pc == limit:
                group.pcs[group.active()] = pc
                break


def _release(groups: list[Group], operations: list[Operation]) -> None:
    """All threads that live are at one barrier: let them go on, with what their votes gave."""
    for group in groups:
        stuck = np.flatnonzero(group.alive & ~group.waiting)
        if stuck.size:
            where = operations[group.pcs[stuck[0]]].instruction
            raise where.error(f"thread {group.threads[stuck[0]]} waits for others of its warp that do not come")
    barriers = [group.barrier for group in groups if group.barrier is not None]
    first = barriers[0]
    if any(barrier.pc != first.pc for barrier in barriers):
        raise operations[first.pc].instruction.error("threads of a block wait at different barriers")
    votes = np.concatenate([barrier.votes[group.waiting] for group, barrier in zip(groups, barriers, strict=True)])
    for group in groups:
        if first.reduce:
            result = {"or": votes.any(), "and": votes.all(), "popc": np.uint32(np.count_nonzero(votes))}[first.reduce]
            group.mask = group.waiting.copy()
            group.write(first.slot, np.full(len(group.threads), result))
        group.waiting[:] = False
        group.barrier = None
