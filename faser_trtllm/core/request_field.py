"""The table of request fields: the names of a field at every door, its bounds and its meaning.

A row stands where the field is declared, as the default of a dataclass's field: `top_k: int | None = param(None, ...)`.
Every door (Triton's tensors, OpenAI's JSON, Dynamo, `faser generate`, the client library) and the docs read the rows.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar

from faser_trtllm.errors import InvalidArgumentError

T = TypeVar("T")

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers that a field may be: low to high, without low itself if it is above_low, without high if below_high.

    words: the limit as an error says it, where the numbers alone do not tell.
    """

    low: float
    high: float
    above_low: bool = False
    below_high: bool = False
    words: str = ""

    @property
    def limit(self) -> str:
        if self.words:
            return self.words
        low, high = (str(int(bound) if bound == int(bound) else bound) for bound in (self.low, self.high))
        if self.high == MAX_INT32:
            return f"{low} or more"
        if self.above_low:
            return f"more than {low} and at most {high}"
        return f"{low} to {'less than ' if self.below_high else ''}{high}"

    def hold(self, value: float) -> bool:
        """True for a value inside; false for NaN."""
        above = self.low < value if self.above_low else self.low <= value
        return above and (value < self.high if self.below_high else value <= self.high)

    def check(self, field: str, value: float) -> None:
        """Raise InvalidArgumentError if value, that of the field, is outside."""
        if not self.hold(value):
            raise InvalidArgumentError(f"is {value}, allowed is {self.limit}", field, value, self.limit)


@dataclass(frozen=True, slots=True)
class Row:
    """One request field.

    name: of the field, and of the input of our Triton models. kind: the type of its value, of one entry where it
    is_list. bounds: of a number. openai: OpenAI's name of it, "" where that door does not take it; openai_bounds:
    that door's, where they are narrower. trtllm: its name in TensorRT-LLM's model `tensorrt_llm`, and older_name in
    TensorRT-LLM up to 0.18, where they differ.
    """

    name: str
    kind: type
    is_list: bool
    default: Any
    help: str
    bounds: Bounds | None
    openai: str
    openai_bounds: Bounds | None
    trtllm: str
    older_name: str

    @property
    def dtype(self) -> str:
        """Triton's type of the input."""
        if self.kind is int:
            return "UINT64" if self.bounds is not None and self.bounds.high > MAX_INT32 else "INT32"
        return {float: "FP32", bool: "BOOL", str: "BYTES"}[self.kind]


def param(
    default: T,
    help: str,
    *,
    bounds: Bounds | None = None,
    openai: str = "",
    openai_bounds: Bounds | None = None,
    trtllm: str = "",
    older_name: str = "",
) -> T:
    """A dataclass's field that is a row of the table; see Row."""
    row = {
        "help": help,
        "bounds": bounds,
        "openai": openai,
        "openai_bounds": openai_bounds or bounds,
        "trtllm": trtllm,
        "older_name": older_name,
    }
    field: T = dataclasses.field(default=default, metadata={"row": row})
    return field


@cache
def rows(request: type) -> tuple[Row, ...]:
    """The rows of a dataclass, in the order of its fields, those of its base first."""
    hints = typing.get_type_hints(request)
    found = []
    for field in dataclasses.fields(request):
        if "row" in field.metadata:
            kind = _without_none(hints[field.name])
            is_list = typing.get_origin(kind) is tuple
            kind = typing.get_args(kind)[0] if is_list else kind
            found.append(Row(field.name, kind, is_list, field.default, **field.metadata["row"]))
    return tuple(found)


def check_bounds(request: Any, of: tuple[Row, ...]) -> None:
    """Raise InvalidArgumentError for the first number of these rows that is given and out of bounds."""
    for row in of:
        value = getattr(request, row.name)
        if row.bounds is not None and value is not None:
            row.bounds.check(row.name, value)


def _without_none(hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return next(kind for kind in kinds if kind is not type(None))
