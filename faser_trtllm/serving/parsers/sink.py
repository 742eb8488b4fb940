"""Collects a parser's events. White space next to a mark belongs to the model's format, not to the text."""

from __future__ import annotations

from faser_trtllm.serving.parsers.event import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from faser_trtllm.serving.parsers.reader import SPACE

Kind = type[ContentDelta] | type[ReasoningDelta]


class Sink:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._kind: Kind | None = ContentDelta
        self._shown: set[Kind] = set()  # kinds of the text so far
        self._space: list[str] = []  # held at the end of the text, since a mark may follow
        self._follows_mark = False
        self._num_calls = 0

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def begin(self, kind: Kind | None, separator: str = "") -> None:
        """Begin text of a kind, after a mark. kind None: leave it out. separator: follows earlier text of the kind."""
        self._kind = kind
        self._mark()
        if separator and kind in self._shown:
            self._space.append(separator)

    def add(self, text: str) -> None:
        """Add text of the current kind."""
        if self._kind is None:
            return
        body = text.rstrip(SPACE)
        space = text[len(body) :]
        if body:
            lead = "".join(self._space)
            self._events.append(self._kind(lead + (body.lstrip(SPACE) if self._follows_mark else body)))
            self._shown.add(self._kind)
            self._space.clear()
            self._follows_mark = False
        if space and not self._follows_mark:
            self._space.append(space)

    def start(self, name: str, call_id: str | None = None) -> None:
        """Start a call."""
        self._mark()
        self._events.append(ToolCallStart(self._num_calls, name, call_id))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the latest call."""
        self._events.append(ToolArgumentsDelta(self._num_calls - 1, text))

    def end(self) -> None:
        """End the text."""
        if self._kind is not None and self._space and not self._follows_mark:
            self._events.append(self._kind("".join(self._space)))
            self._space.clear()

    def _mark(self) -> None:
        self._space.clear()
        self._follows_mark = True
