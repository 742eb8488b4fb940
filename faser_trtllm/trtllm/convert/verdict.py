"""The verdict on one key of a TensorRT-LLM configuration, and the rules that produce it."""

from __future__ import annotations

import difflib
import enum
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Outcome(str, enum.Enum):
    BECAME = "became"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a dotted key. serve: dotted keys of faser.yaml. build: options of `faser build`.

    reason: why the key is ignored, the sentence that refuses it, or a note on the result.
    """

    key: str
    value: Any
    outcome: Outcome
    reason: str = ""
    serve: Mapping[str, Any] = field(default_factory=dict)
    build: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON; values that JSON cannot hold become shortened text."""
        return {
            "key": self.key,
            "value": plain(self.value),
            "outcome": self.outcome.value,
            "serve": dict(self.serve),
            "build": dict(self.build),
            "reason": self.reason,
        }

    def __str__(self) -> str:
        said = f"{self.key}: {show(self.value)}"
        if self.outcome is Outcome.REFUSED:
            return f"{said}  refused: {self.reason}"
        if self.outcome is Outcome.IGNORED:
            return f"{said}  ignored, because {self.reason}"
        places: dict[str, list[str]] = {}
        for place, values in (("serve", self.serve), ("build", self.build)):
            for name, value in values.items():
                places.setdefault(f"{name}: {show(value)}", []).append(place)
        became = ", ".join(f"{what} ({' and '.join(where)})" for what, where in places.items())
        return f"{said}  -> {became}" + (f"; {self.reason}" if self.reason else "")


Rule = Callable[[str, Any], Verdict]


@dataclass(frozen=True, slots=True)
class Section:
    """A rule for a mapping whose keys are judged together."""

    judge: Callable[[str, Mapping[Any, Any]], Iterable[Verdict]]


Rules = Mapping[str, "Rule | Section | Rules"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A requirement on a value, in words and as a test."""

    says: str
    accepts: Callable[[Any], bool]


def whole(minimum: int) -> Kind:
    return Kind(f"a whole number of at least {minimum}", lambda value: type(value) is int and value >= minimum)


FRACTION = Kind("a number above 0 and at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1)
BOOLEAN = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("text", lambda value: isinstance(value, str) and value != "")


def one_of(*choices: str) -> Kind:
    return Kind(f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices)


def became(kind: Kind, *, serve: str | None = None, build: str | None = None, note: str = "") -> Rule:
    """Return a rule that uses the value unchanged under these names, and refuses other kinds of values."""

    def judge(key: str, value: Any) -> Verdict:
        if not kind.accepts(value):
            return refusal(key, value, f"{key} is {show(value)}; it must be {kind.says}")
        return Verdict(
            key,
            value,
            Outcome.BECAME,
            note,
            {serve: value} if serve is not None else {},
            {build: value} if build is not None else {},
        )

    return judge


def ignored(reason: str) -> Rule:
    return lambda key, value: Verdict(key, value, Outcome.IGNORED, reason)


def refused(reason: str) -> Rule:
    """Return a rule that refuses any value except an empty list, mapping or string. reason: it ends with the fix."""

    def judge(key: str, value: Any) -> Verdict:
        if isinstance(value, (str, list, dict)) and not value:
            return Verdict(key, value, Outcome.IGNORED, "it is empty")
        return refusal(key, value, f"{key} is {show(value)}; {reason}")

    return judge


def only(*allowed: Any, otherwise: str) -> Rule:
    """Return a rule that ignores these values, which describe our behavior, and refuses others; case is ignored.

    otherwise: why others are refused; it ends with the fix.
    """

    def judge(key: str, value: Any) -> Verdict:
        if any(_same(value, choice) for choice in allowed):
            return Verdict(key, value, Outcome.IGNORED, "that is the behavior here")
        return refusal(key, value, f"{key} is {show(value)}; {otherwise}")

    return judge


def refusal(key: str, value: Any, sentence: str) -> Verdict:
    return Verdict(key, value, Outcome.REFUSED, sentence)


def unknown(key: str, value: Any, meant: str) -> Verdict:
    """Refuse an unknown key. meant: a suggestion, or ""."""
    hint = f"; did you mean {meant}?" if meant else "; leave it out"
    return refusal(key, value, f"{key} is not a key of TensorRT-LLM{hint}")


def nearest(name: Any, names: Iterable[str]) -> str:
    """Return the most similar known name; "" if there is none."""
    return next(iter(difflib.get_close_matches(str(name), list(names), n=1)), "")


def join(section: str, name: Any) -> str:
    """Return the dotted name of a key; section: "" at the top."""
    spelled = name if isinstance(name, str) and name.isprintable() else _REPR.repr(name)
    return f"{section}.{spelled}" if section else spelled


def show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) and len(value) <= 200 and value.isprintable() else _REPR.repr(value)


def plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else str(value)
    return _REPR.repr(value)


def _same(value: Any, choice: Any) -> bool:
    if isinstance(choice, str):
        return isinstance(value, str) and value.lower() == choice.lower()
    return type(value) is type(choice) and bool(value == choice)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200
_REPR.maxdict = _REPR.maxlist = 16
