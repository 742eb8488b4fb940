"""Parses calls that are JSON objects as they arrive: {"name": ..., "arguments": {...}}, in either order.

The arguments are the model's own characters, from the first brace to the one that closes it. In between, only strings
and brackets are tracked, so arguments that are not valid JSON (an extra comma, a line break in a string) reach the
client unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container

from faser_trtllm.serving.parsers.reader import SPACE, EndOfTextError, MalformedError, Reader, Reading
from faser_trtllm.serving.parsers.sink import Sink

ARGUMENTS = ("arguments", "parameters")
_NOTES = ("id", "type")
_MAX_STRING_CHARS = 1024  # of names and ids
_MAX_KEYS = 8  # before a call's arguments, and after them
_OUTSIDE = re.compile(r'"|[{\[]+|[}\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(f"[{SPACE},}}\\]]")


class Scanner:
    """Finds the end of an object, an array or a string that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def end(self, text: str, start: int) -> int:
        """Return the position after the value, or -1 if it continues after this text. start: where to continue."""
        at = start
        if self._is_escaped and at < len(text):
            at += 1
            self._is_escaped = False
        while True:
            found = (_INSIDE if self._is_string else _OUTSIDE).search(text, at)
            if found is None:
                return -1
            at, last = found.end(), text[found.end() - 1]
            if last == "\\":
                self._is_escaped = at == len(text)
                at += 1
                continue
            if last == '"':
                self._is_string = not self._is_string
            elif last in "{[":
                self._depth += at - found.start()
            else:
                self._depth -= 1
            if not (self._depth or self._is_string):
                return at


def read_call(reader: Reader, sink: Sink, names: Container[str], end: str = "") -> Reading[None]:
    """Read a call and the optional mark `end` after it. Its beginning is held until it is certainly a call.

    Raises MalformedError or EndOfTextError.
    """
    yield from reader.expect("{")
    name: str | None = None
    call_id: str | None = None
    early: list[str] = []  # arguments before the name
    for _ in range(_MAX_KEYS):
        key = yield from _string(reader)
        yield from reader.expect(":")
        if key == "name":
            name = yield from _string(reader)
            if name not in names:
                raise MalformedError
        elif key in _NOTES:
            value = yield from _string(reader)
            call_id = value if key == "id" else call_id
        elif key not in ARGUMENTS or early:
            raise MalformedError
        elif name is None:
            yield from expect_object(reader)
            yield from read_object(reader, early.append)
        else:
            yield from expect_object(reader)
            _start(reader, sink, name, call_id)
            yield from read_object(reader, sink.arguments)
            break
        if name is not None and early:
            _start(reader, sink, name, call_id)
            sink.arguments("".join(early))
            break
        if not (yield from reader.accept(",")):
            yield from reader.expect("}")
            if name is None:
                raise MalformedError
            _start(reader, sink, name, call_id)
            sink.arguments("{}")
            yield from _close(reader, end)
            return
    else:
        raise MalformedError
    yield from _rest(reader, end)


def expect_object(reader: Reader) -> Reading[None]:
    """Raise MalformedError if the next character does not begin an object, or EndOfTextError."""
    if (yield from reader.peek()) != "{":
        raise MalformedError


def read_object(reader: Reader, add: Callable[[str], None]) -> Reading[None]:
    """Pass on the text of the object that begins here, in pieces. Raises EndOfTextError."""
    yield from _scan(reader, add)


def _start(reader: Reader, sink: Sink, name: str, call_id: str | None) -> None:
    reader.forget()
    sink.start(name, call_id)


def _rest(reader: Reader, end: str) -> Reading[None]:
    """Read the rest of the object after the arguments; the call counts whatever the rest is."""
    reader.hold()
    try:
        for _ in range(_MAX_KEYS):
            if (yield from reader.accept("}")):
                break
            if end and (yield from reader.accept(end)):
                return  # the model left the brace out
            yield from reader.expect(",")
            yield from _string(reader)
            yield from reader.expect(":")
            yield from _skip_value(reader)
        else:
            raise MalformedError
    except EndOfTextError:
        reader.forget()
        raise
    yield from _close(reader, end)


def _close(reader: Reader, end: str) -> Reading[None]:
    reader.forget()
    if end:
        yield from reader.accept(end)


def _string(reader: Reader) -> Reading[str]:
    """Read a JSON string and return its value."""
    if (yield from reader.peek()) != '"':
        raise MalformedError
    pieces: list[str] = []
    yield from _scan(reader, pieces.append, _MAX_STRING_CHARS)
    try:
        value = json.loads("".join(pieces))
    except ValueError as error:
        raise MalformedError from error
    assert isinstance(value, str)
    return value


def _skip_value(reader: Reader) -> Reading[None]:
    if (yield from reader.peek()) in '{["':
        yield from _scan(reader, lambda _: None)
        return
    while (found := _SCALAR_END.search(reader.text, reader.at)) is None:
        reader.take(len(reader.text))
        yield from reader.more()
    reader.take(found.start())


def _scan(reader: Reader, add: Callable[[str], None], max_chars: int | None = None) -> Reading[None]:
    """Take a value that begins with a bracket or a quote, and pass on its pieces."""
    scanner = Scanner()
    num_chars = 0
    while True:
        end = scanner.end(reader.text, reader.at)
        stop = len(reader.text) if end < 0 else end
        if max_chars is not None and num_chars + stop - reader.at > max_chars:
            reader.take(reader.at + max_chars - num_chars)  # reading goes on there, wherever pieces ended
            raise MalformedError
        if piece := reader.take(stop):
            num_chars += len(piece)
            add(piece)
        if end >= 0:
            return
        yield from reader.more()
