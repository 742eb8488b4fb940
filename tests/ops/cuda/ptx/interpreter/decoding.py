"""How an instruction's operands are read and written: typed views of a group's registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.ops.cuda.ptx.interpreter.group import Group, Slots
from tests.ops.cuda.ptx.interpreter.program import (
    BYTES,
    Address,
    Constant,
    Instruction,
    Operand,
    PtxError,
    Register,
    Symbol,
    Vector,
)

Array = np.ndarray
Getter = Callable[[Group], Array]
Putter = Callable[[Group, Array], None]
# Execute for the active threads: None goes on, a number is where all of them go, STOP means others are active now.
Run = Callable[[Group], "int | None"]
STOP = -1

_KINDS = {"b": "u", "u": "u", "s": "i", "f": "f"}


def dtype_of(kind: str) -> np.dtype:
    """numpy's type of a PTX type; packed types and those that numpy lacks are their bits."""
    if kind == "pred":
        return np.dtype(bool)
    if kind.startswith("bf") or "x" in kind:
        return np.dtype(f"u{BYTES[kind]}")
    return np.dtype(f"{_KINDS[kind[0]]}{BYTES[kind]}")


@dataclass
class Operation:
    """A decoded instruction. sources: the registers that it reads."""

    run: Run
    sources: frozenset[int]
    instruction: Instruction


@dataclass
class Symbols:
    """The meanings of a kernel's names."""

    variables: dict[str, int]
    parameters: dict[str, int]
    labels: dict[str, int]


class Decoder:
    """A decoder of one instruction at `pc`, which notes what it reads. symbols: addresses of variables, offsets of
    parameters and places of labels."""

    def __init__(self, slots: Slots, instruction: Instruction, pc: int, symbols: Symbols) -> None:
        self._slots, self.instruction, self.pc, self._symbols = slots, instruction, pc, symbols
        self.name, *self.modifiers = instruction.opcode.split(".")
        self.operands = instruction.operands
        self.sources: set[int] = set()

    def unknown(self) -> PtxError:
        """Return the error for an opcode or modifiers that are not implemented."""
        return self.instruction.error("this instruction is unknown here")

    def take(self, allowed: Sequence[str], default: str = "") -> str:
        """Remove the one modifier among `allowed` that is given."""
        found = [modifier for modifier in self.modifiers if modifier in allowed]
        if len(found) > 1:
            raise self.unknown()
        if found:
            self.modifiers.remove(found[0])
        return found[0] if found else default

    def end(self, *types: str) -> None:
        """All modifiers were understood but for these types, in this order."""
        if self.modifiers != [kind for kind in types if kind]:
            raise self.unknown()

    def type(self) -> str:
        """The last modifier, which must be a type."""
        kind = self.modifiers[-1] if self.modifiers else ""
        if kind != "pred" and kind not in BYTES:
            raise self.unknown()
        return kind

    def expect(self, *counts: int) -> None:
        """So many operands."""
        if len(self.operands) not in counts:
            raise self.unknown()

    def get(self, operand: Operand, kind: str, narrow: bool = False) -> Getter:
        """Reads an operand as a type. narrow: a wider register gives its low bits."""
        dtype = dtype_of(kind)
        if isinstance(operand, Symbol) and operand.name in self._symbols.variables:
            operand = Constant(self._symbols.variables[operand.name])
        if isinstance(operand, (Symbol, Address, Vector)):
            raise self.instruction.error("an operand is of the wrong kind")
        place = self._slots.of(operand, dtype if dtype.kind == "b" else np.dtype(f"u{dtype.itemsize}"))
        if isinstance(operand, Register):
            self.sources.add(place)
        held = self._slots.dtypes[place]
        if (held.kind == "b") != (kind == "pred"):
            raise self.instruction.error("a predicate and a number are confused")
        if held == dtype:
            return lambda group: group.regs[place]
        if held.itemsize == dtype.itemsize:
            return lambda group: group.regs[place].view(dtype)
        if held.itemsize < dtype.itemsize or not narrow:
            raise self.instruction.error(f"a register of {8 * held.itemsize} bits does not fit .{kind}")
        low = np.dtype(f"u{dtype.itemsize}")
        return lambda group: group.regs[place].astype(low).view(dtype)

    def gets(self, kind: str, first: int = 1) -> list[Getter]:
        """Readers of the operands from `first` on."""
        return [self.get(operand, kind) for operand in self.operands[first:]]

    def put(self, operand: Operand, kind: str, widen: bool = False) -> Putter:
        """Writes values of a type. widen: a wider register is filled up, with the sign of signed types."""
        if operand == Symbol("_"):
            return lambda group, value: None
        if not isinstance(operand, Register):
            raise self.instruction.error("the result is no register")
        dtype = dtype_of(kind)
        place = self.place_of(operand)
        held = self._slots.dtypes[place]
        if (held.kind == "b") != (kind == "pred"):
            raise self.instruction.error("a predicate and a number are confused")
        if held == dtype:
            return lambda group, value: group.write(place, value)
        if held.itemsize == dtype.itemsize:
            return lambda group, value: group.write(place, value.view(held))
        if held.itemsize < dtype.itemsize or not widen:
            raise self.instruction.error(f"a register of {8 * held.itemsize} bits does not fit .{kind}")
        wide = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{held.itemsize}")
        bits = dtype if dtype.kind in "iu" else np.dtype(f"u{dtype.itemsize}")
        return lambda group, value: group.write(place, value.view(bits).astype(wide).view(held))

    def place_of(self, register: Operand) -> int:
        """Return the place of a result that is written later."""
        return self._slots.of(register, np.dtype(bool))

    def address(self, operand: Operand, space: str) -> Getter:
        """The generic addresses of [base + offset], as uint64; a window's start is added by the caller."""
        if not isinstance(operand, Address):
            raise self.instruction.error("an address is missing")
        offset = np.uint64(operand.offset & (1 << 64) - 1)
        is_wide = isinstance(operand.base, Register) and operand.base.type in ("b64", "u64", "s64")
        if isinstance(operand.base, Register) and not is_wide and space in ("global", "generic"):
            raise self.instruction.error("an address of 32 bits")
        base = self.get(operand.base, "u64" if is_wide or not isinstance(operand.base, Register) else "u32")
        if offset == 0 and is_wide:
            return base
        return lambda group: base(group).astype(np.uint64) + offset

    def label(self, operand: Operand) -> int:
        """Where it is."""
        if not isinstance(operand, Symbol) or operand.name not in self._symbols.labels:
            raise self.instruction.error("the label is missing")
        return self._symbols.labels[operand.name]

    def parameter(self, name: str) -> int:
        """Its offset in the launch's parameters."""
        if name not in self._symbols.parameters:
            raise self.instruction.error(f"there is no parameter {name}")
        return self._symbols.parameters[name]

    def constant(self, operand: Operand) -> int:
        """An operand that must be a number in the text."""
        if not isinstance(operand, Constant):
            raise self.instruction.error("an operand must be a constant")
        return operand.value


def lift(function: Callable[..., Array], gets: Sequence[Getter], put: Putter) -> Run:
    """put(function(values)) for all threads: what inactive ones hold is computed with and then dropped."""
    if len(gets) == 1:
        (one,) = gets
        return lambda group: put(group, function(one(group)))
    if len(gets) == 2:
        one, two = gets
        return lambda group: put(group, function(one(group), two(group)))
    if len(gets) == 3:
        one, two, three = gets
        return lambda group: put(group, function(one(group), two(group), three(group)))
    return lambda group: put(group, function(*[get(group) for get in gets]))
