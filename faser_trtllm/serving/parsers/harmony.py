"""Parses harmony, gpt-oss's format: messages, each with a header that states its channel and may name a recipient.

The prompt ends with "<|start|>assistant", so an answer begins within a header. Messages in the channel analysis are
reasoning, those in final are content, and so is commentary without a recipient, as in vLLM. Texts of one kind are
joined with a line break. A message to a known function is a call if its body is an object. Other commentary with a
recipient is content as it was written, with its header, and so is a header that the text's end cuts. Marks without a
valid header are text of the message they are in, except for one that ends the text.
"""

from __future__ import annotations

import re

from faser_trtllm.serving.parsers.event import ContentDelta, ReasoningDelta
from faser_trtllm.serving.parsers.json_call import expect_object, read_object
from faser_trtllm.serving.parsers.reader import SPACE, EndOfTextError, MalformedError, Marks, Reader, Reading
from faser_trtllm.serving.parsers.sink import Kind, Sink
from faser_trtllm.serving.parsers.tool_parser import Functions, text_up_to

_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKS = Marks(*_ENDS, "<|start|>", "<|channel|>")
_CHANNELS = frozenset(("analysis", "commentary", "final"))
_WORD_END = re.compile(f"[{SPACE}<]")
_MAX_WORD_CHARS = 256


def harmony(
    reader: Reader, sink: Sink, functions: Functions, shows_reasoning: bool, starts_in_reasoning: bool
) -> Reading[None]:
    """Parse a whole answer. Without shows_reasoning, reasoning is left out, as vLLM's parser of calls does."""
    reasoning = ReasoningDelta if shows_reasoning else None
    if starts_in_reasoning:
        sink.begin(reasoning)
    else:
        yield from _message(reader, sink, functions, reasoning)
    while (yield from text_up_to(reader, sink, _MARKS)):
        end = next((mark for mark in _ENDS if reader.text.startswith(mark, reader.at)), "")
        reader.take(reader.at + len(end))
        yield from _message(reader, sink, functions, reasoning, end)


def _message(reader: Reader, sink: Sink, functions: Functions, reasoning: Kind | None, end: str = "") -> Reading[None]:
    """Read a header and, of a call, the arguments. end: the mark before it."""
    is_message = False
    reader.hold()
    try:
        channel, recipient = yield from _header(reader)
        is_message = True
        name = recipient.removeprefix("functions.")
        if name in functions:
            yield from expect_object(reader)
            reader.forget()
            sink.begin(ContentDelta)  # after the arguments
            sink.start(name)
            yield from read_object(reader, sink.arguments)
            for mark in _ENDS:
                if (yield from reader.accept(mark)):
                    break
        elif channel == "commentary" and recipient:
            raise MalformedError
        else:
            reader.forget()
            sink.begin(reasoning if channel == "analysis" else ContentDelta, "\n")
    except (MalformedError, EndOfTextError) as error:
        if not reader.is_holding:
            reader.take(len(reader.text))  # part of a mark after the arguments
            return
        if is_message or (end and isinstance(error, EndOfTextError)):
            sink.begin(ContentDelta, "\n")
            end = ""
        sink.add(end + reader.release())


def _header(reader: Reader) -> Reading[tuple[str, str]]:
    """Read up to a message's body; return its channel and its recipient, or "". The recipient may come before either.

    Raises MalformedError or EndOfTextError.
    """
    if (yield from reader.accept("<|start|>")):
        yield from reader.expect("assistant")
    recipient = yield from _recipient(reader)
    yield from reader.expect("<|channel|>")
    channel = yield from _word(reader)
    if channel not in _CHANNELS:
        raise MalformedError
    recipient = (yield from _recipient(reader)) or recipient
    if (yield from reader.accept("<|constrain|>")) or not (yield from reader.accept("<|message|>")):
        yield from _word(reader)  # the body's type
        yield from reader.expect("<|message|>")
    return channel, recipient


def _recipient(reader: Reader) -> Reading[str]:
    return (yield from _word(reader)) if (yield from reader.accept("to=")) else ""


def _word(reader: Reader) -> Reading[str]:
    """Take white space and the text up to the next space or mark."""
    yield from reader.peek()
    while (found := _WORD_END.search(reader.text, reader.at, reader.at + _MAX_WORD_CHARS + 1)) is None:
        if len(reader.text) - reader.at > _MAX_WORD_CHARS:
            raise MalformedError
        yield from reader.more()
    return reader.take(found.start())
