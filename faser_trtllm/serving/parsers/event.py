"""Events that a parser finds in a model's text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a call."""

    index: int  # in the answer, from 0
    name: str
    call_id: str | None = None  # if the model wrote one


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """Text of the arguments of the latest call."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta
