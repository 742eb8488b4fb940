"""Parsers for the ways in which model families write calls.

Text that begins like a call but is not one (an unknown function, arguments that are not an object, the end of the text)
is content as it was written. Marks within it are not searched again, so parsing takes linear time. Once the name is
known and the arguments have begun, it is a call: its arguments end at their closing bracket, whatever is in between, or
at the end of the text. The rest of the call's object is left out; if it is malformed, content continues there. Marks in
a string of the arguments are part of the string.

The text must contain the marks, including those that are special tokens, which detokenizing may leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from faser_trtllm.serving.parsers.json_call import expect_object, read_call, read_object
from faser_trtllm.serving.parsers.reader import EndOfTextError, MalformedError, Marks, Reader, Reading
from faser_trtllm.serving.parsers.sink import Sink
from faser_trtllm.serving.parsers.xml_call import read_xml_call

Functions = Mapping[str, Mapping[str, Any]]  # function name -> schema of its arguments
ToolParser = Callable[[Reader, Sink, Functions], Reading[None]]
_MAX_NAME_CHARS = 256


def text_up_to(reader: Reader, sink: Sink, marks: Marks) -> Reading[bool]:
    """Pass on text up to a mark, which is not taken; return True if there is one."""
    while True:
        place, is_found = marks.find(reader.text, reader.at)
        sink.add(reader.take(place))
        if is_found:
            return True
        if reader.has_ended:
            sink.add(reader.take(len(reader.text)))
            return False
        yield


def hermes(reader: Reader, sink: Sink, functions: Functions) -> Reading[None]:
    """Parse <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated: Hermes, Qwen2.5 and Qwen3.

    The marks are added tokens, but not special ones in Qwen.
    """

    def call() -> Reading[None]:
        yield from reader.expect("<tool_call>")
        yield from read_call(reader, sink, functions, "</tool_call>")

    marks = Marks("<tool_call>")
    while (yield from text_up_to(reader, sink, marks)):
        yield from _attempt(reader, sink, call())


def llama3_json(reader: Reader, sink: Sink, functions: Functions) -> Reading[None]:
    """Parse {"name": ..., "parameters": {...}} at the beginning or after <|python_tag|>: Llama 3.1, 3.2, 3.3 and 4.

    Further calls follow, with or without a semicolon. <|python_tag|> is a special token.
    """

    def call() -> Reading[None]:
        if is_next:
            yield from reader.accept(";")
        yield from reader.accept("<|python_tag|>")
        yield from read_call(reader, sink, functions)

    marks = Marks("<|python_tag|>")
    is_next = False
    may_begin = True
    while may_begin or (yield from text_up_to(reader, sink, marks)):
        is_next = may_begin = yield from _attempt(reader, sink, call())


def mistral(reader: Reader, sink: Sink, functions: Functions) -> Reading[None]:
    """Parse the calls of Mistral, Mixtral, Ministral, Devstral and Magistral.

    [TOOL_CALLS] is followed by a JSON list of objects, or by a name, optionally [CALL_ID] and an id, optionally [ARGS],
    and the arguments. All three marks are special tokens.
    """

    def listed() -> Reading[None]:
        while True:
            yield from read_call(reader, sink, functions)
            reader.hold()
            if not (yield from reader.accept(",")):
                yield from reader.accept("]")
                reader.forget()
                return

    def call() -> Reading[None]:
        yield from reader.expect("[TOOL_CALLS]")
        first = yield from reader.peek()
        if first == "{":
            yield from read_call(reader, sink, functions)
        elif first == "[":
            yield from reader.accept("[")
            yield from listed()
        else:
            head = (yield from reader.until("{", 2 * _MAX_NAME_CHARS)).rstrip().removesuffix("[ARGS]")
            name, _, call_id = head.partition("[CALL_ID]")
            yield from _arguments(reader, sink, functions, name.strip(), call_id.strip() or None)

    marks = Marks("[TOOL_CALLS]")
    while (yield from text_up_to(reader, sink, marks)):
        yield from _attempt(reader, sink, call())


_CALLS, _CALL, _NAME, _CALL_END, _CALLS_END = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)


def deepseek_v3(reader: Reader, sink: Sink, functions: Functions) -> Reading[None]:
    """Parse DeepSeek's calls, which are between the marks tool_calls_begin and tool_calls_end.

    V3: tool_call_begin, type, tool_sep, name, a fenced block of JSON, tool_call_end.
    V3.1: tool_call_begin, name, tool_sep, JSON, tool_call_end.
    The marks, spelled with the bars and spaces of DeepSeek's tokenizer, are added tokens.
    """

    def call() -> Reading[None]:
        yield from reader.accept(_CALLS)
        yield from reader.expect(_CALL)
        name = yield from reader.until("<", _MAX_NAME_CHARS)
        yield from reader.expect(_NAME)
        if (yield from reader.peek()) != "{":
            name = yield from reader.until("\n", _MAX_NAME_CHARS)
            yield from reader.expect("```json")
        yield from _arguments(reader, sink, functions, name.strip())
        for mark in ("```", _CALL_END, _CALLS_END):
            yield from reader.accept(mark)

    marks = Marks(_CALLS, _CALL)
    while (yield from text_up_to(reader, sink, marks)):
        yield from _attempt(reader, sink, call())


def qwen3_coder(reader: Reader, sink: Sink, functions: Functions) -> Reading[None]:
    """Parse <tool_call><function=NAME><parameter=KEY>VALUE</parameter> ... </function></tool_call>.

    Qwen3-Coder and Qwen3.5. The outer tags may be missing; only they are added tokens, and not special ones.
    """

    def call() -> Reading[None]:
        yield from reader.accept("<tool_call>")
        yield from read_xml_call(reader, sink, functions)
        yield from reader.accept("</tool_call>")

    marks = Marks("<tool_call>", "<function=")
    while (yield from text_up_to(reader, sink, marks)):
        yield from _attempt(reader, sink, call())


def _arguments(
    reader: Reader, sink: Sink, functions: Functions, name: str, call_id: str | None = None
) -> Reading[None]:
    """Read the arguments of a call whose name came before them."""
    if name not in functions:
        raise MalformedError
    yield from expect_object(reader)
    reader.forget()
    sink.start(name, call_id)
    yield from read_object(reader, sink.arguments)


def _attempt(reader: Reader, sink: Sink, call: Reading[None]) -> Reading[bool]:
    """Read a call; return True if it was complete. If reading fails, the held text is content."""
    reader.hold()
    try:
        yield from call
    except MalformedError:
        sink.add(reader.release())
        return False
    except EndOfTextError:
        if reader.is_holding:
            sink.add(reader.release())
        else:
            reader.take(len(reader.text))  # part of a closing mark
        return False
    reader.forget()
    return True
