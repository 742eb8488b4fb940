"""Reads typed fields of a JSON object; a wrong type or value raises an error of one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from typing import Any

from faser_trtllm.core.request_field import MAX_INT32, Bounds, Row
from faser_trtllm.serving.openai.error import RequestError

_MAX_SHOWN_CHARS = 60


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse the body as a JSON object; raise RequestError."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant, parse_float=_finite_float)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}; send JSON encoded as UTF-8") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply; send a flat JSON object") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON at character {error.pos}: {error.msg.lower()}") from error
    except ValueError as error:  # an integer of thousands of digits
        raise RequestError("the body has a number with too many digits; shorten it") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body is {kind_of(value)}; it must be a JSON object")
    return value


class Fields:
    """The fields of one object by name; null counts as absent. All methods raise RequestError."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        return list(self._values)

    def check_names(self, known: Container[str], refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
        """Raise RequestError for unknown fields and for unsupported ones.

        refused: unsupported fields, with the values that have no effect and the reason why others are refused.
        """
        for name in self.names():
            if name not in known:
                raise RequestError(f"{shown(name)} is not a field of this request; leave it out", param=name[:100])
            harmless, why = refused.get(name, (None, ""))
            if harmless is not None and self.get(name) not in harmless:
                raise RequestError(f"was sent, but {why}; leave it out", name)

    def get(self, name: str) -> Any:
        """Return the raw value, or None if absent."""
        return self._values.get(name)

    def row(self, row: Row) -> Any:
        """Return the value of the OpenAI field that this row of the request table declares; None if absent."""
        if row.kind is str:
            return self.text(row.openai)
        if row.kind is bool:
            return self.flag(row.openai) if row.openai in self else None
        assert row.openai_bounds is not None
        return self.number(row.openai, row.openai_bounds, row.kind)

    def number(self, name: str, bounds: Bounds, kind: type = float) -> Any:
        """Return a number within bounds, None if absent. kind: float, or int for a whole number."""
        value = self.get(name)
        if value is None:
            return None
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and isinstance(value, float)):
            noun = "a whole number" if kind is int else "a number"
            raise RequestError(
                f"is {shown(value)}; it must be {noun}, allowed is {bounds.limit}", name, limit=bounds.limit
            )
        if not bounds.hold(value):  # false for huge integers too, before they are made floats
            what = shown(value)
            raise RequestError(f"is {what}, allowed is {bounds.limit}", name, value=what, limit=bounds.limit)
        return kind(value)

    def integer(self, name: str, low: int, high: int = MAX_INT32) -> int | None:
        """Return a whole number from low to high, None if absent."""
        found: int | None = self.number(name, Bounds(low, high), int)
        return found

    def flag(self, name: str) -> bool:
        """Return a boolean; False if absent."""
        value = self.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise RequestError(f"is {shown(value)}; it must be true or false", name)
        return value

    def text(self, name: str) -> str | None:
        """Return a string that UTF-8 can encode, None if absent."""
        value = self.get(name)
        return None if value is None else checked_text(name, value)


def checked_text(name: str, value: Any) -> str:
    """Return `value` if it is a string that UTF-8 can encode; raise RequestError."""
    if not isinstance(value, str):
        raise RequestError(f"is {kind_of(value)}; it must be a string", name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"has half of a surrogate pair at character {error.start}; send whole characters", name
        ) from error
    return value


def shown(value: Any) -> str:
    """Return a value as shown in an error message, shortened."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 70 digits"
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def kind_of(value: Any) -> str:
    """Return a phrase for the kind of a JSON value: its type, or true, false or null."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"an array of length {len(value)}"
    return {str: "a string", int: "a number", float: "a number"}.get(type(value), "an object")


def _finite_float(text: str) -> float:
    """Parse a number; raise RequestError if it is too large for a float, since JSON cannot repeat infinity."""
    value = float(text)
    if math.isinf(value):
        raise RequestError(f"the body has the number {text[:_MAX_SHOWN_CHARS]}, which is too large; shorten it")
    return value


def _refuse_constant(name: str) -> float:
    raise RequestError(f"the body has {name}, which is not JSON; send finite numbers")
