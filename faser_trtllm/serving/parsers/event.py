"""Events that a parser finds in the text of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
    """A call begins. index: of the call in the answer, from 0. call_id: that the model wrote, None: it wrote none."""

    index: int
    name: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """Text of the arguments of the call that began last."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta


class OutputParser(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> Sequence[Event]:
        """Return the events that the next text adds."""

    def finish(self) -> Sequence[Event]:
        """Return the events that were held back, at the end of the text."""
