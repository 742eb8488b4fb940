"""The table of request fields: each field's names in every API, its bounds and its meaning.

A row is declared as the default of a dataclass field: `top_k: int | None = param(None, ...)`. Every API (Triton's
tensors, OpenAI's JSON, Dynamo, `faser generate`, the client library) and the docs read these rows.
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
    """The numbers that a field may take: low to high, both included by default."""

    low: float
    high: float
    above_low: bool = False  # low itself is excluded
    below_high: bool = False  # high itself is excluded
    words: str = ""  # the limit in error messages, where the numbers alone are unclear

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
        """Return True for a value inside the bounds, False for NaN."""
        above = self.low < value if self.above_low else self.low <= value
        return above and (value < self.high if self.below_high else value <= self.high)

    def check(self, field: str, value: float) -> None:
        """Raise InvalidArgumentError, naming the field, if value is outside the bounds."""
        if not self.hold(value):
            raise InvalidArgumentError(f"is {value}, allowed is {self.limit}", field, value, self.limit)


@dataclass(frozen=True, slots=True)
class Row:
    """One request field."""

    name: str  # of the field, and of the input of our Triton models
    kind: type  # of its value, or of one entry if is_list
    is_list: bool
    default: Any
    help: str
    bounds: Bounds | None
    openai: str  # its name in the OpenAI API; "" if that does not accept it
    openai_bounds: Bounds | None  # may be narrower
    trtllm: str  # its name in TensorRT-LLM's model `tensorrt_llm`, if different
    older_name: str  # its name up to TensorRT-LLM 0.18, if different

    @property
    def dtype(self) -> str:
        """Triton's data type of the input."""
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
    """Declare a dataclass field that is a row of the table; see Row."""
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
    """Return a dataclass's rows in the order of its fields, those of its base class first."""
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
    """Raise InvalidArgumentError for the first of these rows whose value is given and out of bounds."""
    for row in of:
        value = getattr(request, row.name)
        if row.bounds is not None and value is not None:
            row.bounds.check(row.name, value)


def _without_none(hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return next(kind for kind in kinds if kind is not type(None))
