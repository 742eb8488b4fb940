"""Parses an answer: reasoning, then content and calls.

Reasoning begins in the prompt or with an opening mark at the start of the answer. It ends at the first closing mark;
calls within it are reasoning. A closing mark without reasoning is content, and so is an opening mark anywhere else.
"""

from __future__ import annotations

from faser_trtllm.serving.parsers.event import ContentDelta, Event, ReasoningDelta
from faser_trtllm.serving.parsers.reader import EndOfTextError, Marks, Reader, Reading
from faser_trtllm.serving.parsers.sink import Sink
from faser_trtllm.serving.parsers.tool_parser import Functions, ToolParser, text_up_to


class Parser:
    """Parses one answer with reasoning and calls.

    Without read_calls, calls are content. thinking: the marks around the reasoning, or None if there is none.
    """

    def __init__(
        self,
        read_calls: ToolParser | None,
        functions: Functions,
        thinking: tuple[str, str] | None,
        starts_in_reasoning: bool,
    ) -> None:
        self._reader = Reader()
        self._sink = Sink()
        self._reading = _read(self._reader, self._sink, read_calls, functions, thinking, starts_in_reasoning)
        next(self._reading)

    def feed(self, text: str) -> list[Event]:
        """Return the events that the next piece of text adds."""
        self._reader.add(text)
        next(self._reading)
        return self._sink.take()

    def finish(self) -> list[Event]:
        """End the text; return the events that were held back."""
        self._reader.has_ended = True
        next(self._reading, None)
        self._sink.end()
        return self._sink.take()


def _read(
    reader: Reader,
    sink: Sink,
    read_calls: ToolParser | None,
    functions: Functions,
    thinking: tuple[str, str] | None,
    starts_in_reasoning: bool,
) -> Reading[None]:
    if thinking is not None:
        yield from _read_reasoning(reader, sink, *thinking, starts_in_reasoning)
    if read_calls is not None:
        yield from read_calls(reader, sink, functions)
    while not reader.has_ended:
        sink.add(reader.take(len(reader.text)))
        yield
    sink.add(reader.take(len(reader.text)))


def _read_reasoning(reader: Reader, sink: Sink, start: str, end: str, has_started: bool) -> Reading[None]:
    if has_started:
        sink.begin(ReasoningDelta)
    reader.hold()
    try:
        is_opened = yield from reader.accept(start)
    except EndOfTextError:
        is_opened = False
    begun = reader.release()
    if is_opened:
        sink.begin(ReasoningDelta)
    else:
        sink.add(begun)
    if (is_opened or has_started) and (yield from text_up_to(reader, sink, Marks(end))):
        reader.take(reader.at + len(end))
        sink.begin(ContentDelta)
