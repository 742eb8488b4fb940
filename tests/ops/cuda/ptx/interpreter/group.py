"""Threads that execute together: their registers, which of them are active, and where the others are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.ops.cuda.ptx.interpreter.program import BYTES, Constant, Operand, PtxError, Register, Special

Array = np.ndarray
LANES = 32
END = 1 << 30  # a place after the last instruction

_POISON = 0xA5A5A5A5A5A5A5A5


class Slots:
    """Where a kernel's registers and constants are in a group's list of arrays; made while instructions are decoded."""

    def __init__(self) -> None:
        self._places: dict[Any, int] = {}
        self.dtypes: list[np.dtype] = []
        self.names: dict[int, str] = {}
        self._constants: dict[int, int] = {}
        self.specials: dict[int, str] = {}
        self._templates: dict[int, list[Array]] = {}

    def of(self, operand: Operand, dtype: np.dtype) -> int:
        """The place of a register (which has its own type), or of a constant or special register of a type."""
        if isinstance(operand, Register):
            dtype = np.dtype(bool if operand.type == "pred" else f"u{BYTES[operand.type]}")
        if (operand, dtype) in self._places:
            return self._places[operand, dtype]
        place = self._places[operand, dtype] = len(self.dtypes)
        self.dtypes.append(dtype)
        if isinstance(operand, Register):
            self.names[place] = operand.name
        elif isinstance(operand, Constant):
            self._constants[place] = operand.value & ((1 << 8 * dtype.itemsize) - 1)
        elif isinstance(operand, Special):
            self.specials[place] = operand.name
        return place

    def arrays(self, num_threads: int) -> list[Array]:
        """Constants, and registers that nobody has written, for so many threads. No array is ever written to."""
        if num_threads not in self._templates:
            made = []
            for place, dtype in enumerate(self.dtypes):
                value = self._constants.get(place, _POISON & ((1 << 8 * dtype.itemsize) - 1))
                made.append(np.full(num_threads, value, dtype))
            self._templates[num_threads] = made
        return list(self._templates[num_threads])


@dataclass
class Copies:
    """A cp.async of some threads, by their places in the group: [n] each. number: of the thread's groups committed
    before; done: it has arrived."""

    members: Array
    targets: Array
    sources: Array
    sizes: Array
    width: int
    number: Array
    done: Array


@dataclass
class Barrier:
    """A barrier at which threads wait. bar.red: how votes [threads] are reduced, and the place of the result."""

    pc: int
    reduce: str
    slot: int
    votes: Array


@dataclass
class Launch:
    """The data of a launch that all its threads see."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: bytes
    copies_early: bool
    max_steps: int
    functions: Mapping[str, Callable[..., None]]

    @property
    def num_threads(self) -> int:
        """The number of threads in a block."""
        return self.block[0] * self.block[1] * self.block[2]


class Group:
    """Some threads of a block. mask: the active ones, None if all are; pcs and flags say where the others are."""

    def __init__(self, slots: Slots, threads: Array, launch: Launch, block: tuple[int, int, int], memory: Any) -> None:
        self.threads, self.launch, self.memory, self.slots = threads, launch, memory, slots
        self.regs = slots.arrays(len(threads))
        for place, name in slots.specials.items():
            self.regs[place] = _special(name, threads, launch, block).astype(slots.dtypes[place])
        self.undefined = set(slots.names)
        self._defined: dict[int, Array] = {}
        count = len(threads)
        self.mask: Array | None = None
        self.pcs = np.zeros(count, np.int64)
        self.alive = threads < launch.num_threads  # a block's last warp may be a part of one
        self.waiting, self.blocked = np.zeros(count, bool), np.zeros(count, bool)
        self.is_alone = True
        self.barrier: Barrier | None = None
        self.pending: list[Copies] = []
        self.committed = np.zeros(count, np.int64)

    def active(self) -> Array:
        """[threads] bool."""
        return np.ones(len(self.threads), bool) if self.mask is None else self.mask

    def chosen(self) -> Any:
        """Return an index that picks the active threads of an array."""
        return slice(None) if self.mask is None else self.mask

    def write(self, place: int, value: Array) -> None:
        """The active threads' values of a register."""
        if self.mask is None:
            self.regs[place] = value
            if place in self.undefined:
                self.undefined.discard(place)
                self._defined.pop(place, None)
        else:
            self.regs[place] = np.where(self.mask, value, self.regs[place])
            if place in self.undefined:
                defined = self._defined.get(place)
                defined = self.mask if defined is None else defined | self.mask
                self._defined[place] = defined
                if defined.all():
                    self.undefined.discard(place)
                    del self._defined[place]

    def spread(self, values: Array) -> Array:
        """[threads] from the values of the active ones."""
        if self.mask is None:
            return values
        whole = np.zeros(len(self.threads), values.dtype)
        whole[self.mask] = values
        return whole

    def check_defined(self, sources: frozenset[int]) -> None:
        """PtxError where an active thread reads a register that it has not written."""
        for place in sources & self.undefined:
            missing = self.active() & ~self._defined.get(place, np.zeros(len(self.threads), bool))
            if missing.any():
                first = self.threads[np.flatnonzero(missing)[0]]
                raise PtxError(f"thread {first} reads {self.slots.names[place]}, which it has not written")

    def choose(self) -> tuple[int, int] | None:
        """Activate the threads that are furthest behind: (their place, that of the next ones); None: nobody can go on.

        Where control flow is structured this lets threads that parted meet again as early as they can.
        """
        runnable = self.alive & ~self.waiting & ~self.blocked
        if not runnable.any():
            return None
        pc = int(self.pcs[runnable].min())
        active = self.alive & ~self.waiting & (self.pcs == pc)
        self.blocked &= ~active
        others = self.alive & ~self.waiting & ~active
        self.is_alone = not others.any()
        later = self.pcs[others & (self.pcs > pc)]
        self.mask = None if active.all() else active
        return pc, int(later.min()) if later.size else END

    def gather_warps(self, pc: int, needed: Array | None = None) -> bool:
        """Keep those active whose warps are complete at a collective; the others wait here for their warps.

        needed: which threads each warp's collective is of, by default all that live. False: nobody is left.
        """
        if self.mask is None and needed is None:
            return True
        active = self.active()
        per_warp = active.reshape(-1, LANES)
        needed = self.alive if needed is None else needed
        lacking = (needed & ~active).reshape(-1, LANES).any(1) & per_warp.any(1)
        if (needed & ~self.alive).reshape(-1, LANES)[per_warp.any(1)].any():
            raise PtxError("a thread that the collective needs has ended or never was")
        if not lacking.any():
            return True
        stalled = (per_warp & lacking[:, None]).ravel()
        self.blocked |= stalled
        self.pcs[stalled] = pc
        self.mask = active & ~stalled
        self.is_alone = False
        return bool(self.mask.any())


def _special(name: str, threads: Array, launch: Launch, block: tuple[int, int, int]) -> Array:
    width, height, _ = launch.block
    indices = {
        "%tid": (threads % width, threads // width % height, threads // width // height),
        "%ntid": launch.block,
        "%ctaid": block,
        "%nctaid": launch.grid,
    }
    base, _, axis = name.partition(".")
    if base not in indices or axis not in ("x", "y", "z"):
        raise PtxError(f"special register {name} is unknown")
    return np.broadcast_to(np.asarray(indices[base]["xyz".index(axis)]), threads.shape)
