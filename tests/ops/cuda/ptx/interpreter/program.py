"""PTX text as nvcc writes it, read into kernels: declarations, and instructions with their operands and lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

BYTES = {f"{kind}{8 * n}": n for kind in "bsu" for n in (1, 2, 4, 8)}
BYTES |= {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4, "bf16x2": 4, "e4m3x2": 2}


class PtxError(Exception):
    """The text cannot be read, or a kernel did what PTX forbids; says the line."""


@dataclass(frozen=True)
class Register:
    """One of a kernel, by a name that is its own."""

    name: str
    type: str


@dataclass(frozen=True)
class Constant:
    """An integer, or the bits of a float."""

    value: int


@dataclass(frozen=True)
class Special:
    """A register that the machine fills, like %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A variable, a parameter or a label."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset]."""

    base: Operand
    offset: int


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}, the two results of a|b, and the parameters (a, b, ...) of a call."""

    parts: tuple[Operand, ...]


Operand = Register | Constant | Special | Symbol | Address | Vector


@dataclass(frozen=True)
class Instruction:
    """opcode: with all its modifiers; guard: a predicate and whether it is negated."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    line: int
    text: str

    def error(self, what: str) -> PtxError:
        """Return an error that says what went wrong at this instruction."""
        return PtxError(f"line {self.line}: {self.text}: {what}")


@dataclass(frozen=True)
class Variable:
    """A variable in a kernel's shared or local memory, or in its module's global memory."""

    space: str
    alignment: int
    size: int
    memory: np.ndarray | None = None  # global memory, zeros when the module is loaded


@dataclass
class Kernel:
    """An entry: parameters are (name, bytes); labels give places in `instructions`."""

    name: str
    parameters: list[tuple[str, int]]
    variables: dict[str, Variable] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)[^{]*\{")
_COMMENT = re.compile(r"//[^\n]*")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\S*\s+(?:\.align\s+\d+\s+)?)?(\w+)")
# Parameters of a call are registers of its own block.
_REGISTERS = re.compile(r"\.(?:reg|param)\s+\.(\w+)\s+([^\[]*)")
_VARIABLE = re.compile(
    r"^\.(shared|local|global)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?", re.MULTILINE
)
_LABEL = re.compile(r"([$\w]+):(?!:)")
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_PART = re.compile(r"\s*(\{[^}]*\}|\([^)]*\)|\[[^\]]*\]|[^,{}()\[\]]+)\s*(?:,|$)")


class Program:
    """The kernels of a PTX text, each read when it is first asked for."""

    def __init__(self, text: str) -> None:
        self._text = _COMMENT.sub("", text)
        self._entries = {match[1]: match for match in _ENTRY.finditer(self._text)}
        self._kernels: dict[str, Kernel] = {}
        # Those of several kernels begin a line; a kernel's own are indented.
        self._variables = dict(_variable(match) for match in _VARIABLE.finditer(self._text))

    @property
    def names(self) -> list[str]:
        """The names of all kernels, in the order of the text."""
        return list(self._entries)

    def kernel(self, name: str) -> Kernel:
        """PtxError if there is none of that name or its text is not understood."""
        if name not in self._entries:
            raise PtxError(f"there is no kernel {name}; the text has {', '.join(self._entries)}")
        if name not in self._kernels:
            entry = self._entries[name]
            parameters = [(match[2], BYTES[match[1]]) for match in _PARAMETER.finditer(entry[2])]
            reader = _Reader(Kernel(name, parameters, dict(self._variables)))
            self._kernels[name] = reader.read(self._text, entry.end())
        return self._kernels[name]


def _variable(match: re.Match[str]) -> tuple[str, Variable]:
    size = BYTES[match[3]]
    total = size * int(match[5] or 1)
    memory = np.zeros(total, np.uint8) if match[1] == "global" else None
    return match[4], Variable(match[1], int(match[2] or size), total, memory)


class _Reader:
    """Reads a kernel's body. A name that an inner block declares again is another register."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._scopes: list[dict[str, Register]] = [{}]
        self._num_scopes = 0

    def read(self, text: str, at: int) -> Kernel:
        line = text.count("\n", 0, at) + 1
        for kind, content, skipped in _statements(text, at):
            line += skipped
            if kind == "{":
                self._num_scopes += 1
                self._scopes.append({})
            elif kind == "}":
                self._scopes.pop()
            elif kind == ":":
                self._kernel.labels[content] = len(self._kernel.instructions)
            else:
                self._statement(" ".join(content.split()), line)
        return self._kernel

    def _statement(self, text: str, line: int) -> None:
        if text.startswith(".pragma"):
            return
        if match := _REGISTERS.fullmatch(text):
            for name in match[2].split(","):
                self._declare(match[1], name.strip())
        elif match := _VARIABLE.fullmatch(text):
            self._kernel.variables.update([_variable(match)])
        elif match := _STATEMENT.fullmatch(text):
            negated, guard, opcode, rest = match.groups()
            operands, at = [], 0
            while at < len(rest):
                part = _PART.match(rest, at)
                if part is None:
                    raise PtxError(f"line {line}: {text}: the operands are not understood")
                operands.append(self._operand(part[1].strip(), line))
                at = part.end()
            found = (self._register(guard, line), bool(negated)) if guard else None
            self._kernel.instructions.append(Instruction(opcode, tuple(operands), found, line, text))
        else:
            raise PtxError(f"line {line}: {text}: is not understood")

    def _declare(self, kind: str, name: str) -> None:
        scope = self._scopes[-1]
        inner = f"@{self._num_scopes}" if len(self._scopes) > 1 else ""
        if match := re.fullmatch(r"(\S+)<(\d+)>", name):
            scope.update({f"{match[1]}{i}": Register(f"{match[1]}{i}{inner}", kind) for i in range(int(match[2]))})
        else:
            scope[name] = Register(name + inner, kind)

    def _register(self, name: str, line: int) -> Register:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        raise PtxError(f"line {line}: register {name} is not declared")

    def _operand(self, text: str, line: int) -> Operand:
        if text.startswith(("{", "(")):
            return Vector(tuple(self._operand(part.strip(), line) for part in text[1:-1].split(",")))
        if text.startswith("["):
            base, _, offset = text[1:-1].partition("+")
            return Address(self._operand(base.strip(), line), int(offset or "0", 0))
        if "|" in text:
            return Vector(tuple(self._operand(part.strip(), line) for part in text.split("|")))
        if text.startswith("%"):
            is_declared = any(text in scope for scope in self._scopes)
            return self._register(text, line) if is_declared or "." not in text else Special(text)
        if match := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
            return Constant(int(match[1], 16))
        if re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", text):
            return Constant(int(text.rstrip("U"), 0))
        if re.fullmatch(r"[$\w]+", text):
            is_declared = any(text in scope for scope in self._scopes)
            return self._register(text, line) if is_declared else Symbol(text)
        raise PtxError(f"line {line}: operand {text} is not understood")


def _statements(text: str, at: int) -> Iterator[tuple[str, str, int]]:
    """(kind, text, newlines since the one before): braces, labels (":") and what ends in ";" until the body ends."""
    depth, counted = 1, at
    while True:
        while text[at].isspace():
            at += 1
        newlines, counted = text.count("\n", counted, at), at
        if text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return
            yield text[at], "", newlines
            at += 1
        elif label := _LABEL.match(text, at):
            yield ":", label[1], newlines
            at = label.end()
        else:
            end = text.index(";", at)
            yield ";", text[at:end], newlines
            at = end + 1
