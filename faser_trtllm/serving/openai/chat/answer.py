"""Builds the assistant's message from a parser's events, as OpenAI's deltas or whole."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faser_trtllm.serving.parsers.event import ContentDelta, Event, ReasoningDelta, ToolCallStart
from faser_trtllm.serving.parsers.registry import make_parser

_ALPHABET = string.ascii_letters + string.digits
_SHORT_IDS = frozenset(("mistral",))  # its templates require ids of nine characters
_REASONING = ("reasoning_content", "reasoning")  # the name of SGLang and DeepSeek, and vLLM's
Delta = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the text of a request's answers is parsed."""

    tool_parser: str | None  # None: the text has no calls
    reasoning_parser: str | None  # None: the text has no reasoning
    tools: Sequence[Mapping[str, Any]] = ()  # as passed to the chat template
    starts_in_reasoning: bool = False  # the prompt ends within the reasoning
    is_parallel: bool = True  # an answer may have several calls
    shows_reasoning: bool = True  # the answer includes the reasoning
    is_named: bool = False  # the request named the function to call


class Answer:
    """One answer, from its first text to its last."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing
        self._parser = make_parser(
            parsing.tool_parser,
            parsing.reasoning_parser,
            tools=parsing.tools,
            starts_in_reasoning=parsing.starts_in_reasoning,
        )
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[Delta, list[str]]] = []  # each call's first delta, and its arguments
        self._has_calls = False

    def deltas(self, text: str, is_last: bool) -> list[Delta]:
        """Return the deltas that the next text adds."""
        deltas: list[Delta] = []
        for event in self._events(text, is_last):
            delta = self._delta(event)
            if not (deltas and _merge(deltas[-1], delta)):
                deltas.append(delta)
        return deltas

    def add(self, text: str, is_last: bool) -> None:
        """Add the next text to the message."""
        for event in self._events(text, is_last):
            if isinstance(event, ContentDelta):
                self._content.append(event.text)
            elif isinstance(event, ReasoningDelta):
                self._reasoning.append(event.text)
            elif isinstance(event, ToolCallStart):
                (begin,) = self._delta(event)["tool_calls"]
                self._calls.append((begin, []))
            else:
                self._calls[-1][1].append(event.text)

    def message(self) -> dict[str, Any]:
        """Return the message of all added texts."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._parsing.reasoning_parser is not None:
            message |= dict.fromkeys(_REASONING, "".join(self._reasoning) or None)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": begin["id"], "type": "function", "function": begin["function"] | {"arguments": "".join(pieces)}}
                for begin, pieces in self._calls
            ]
        return message

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's finish reason; an answer with the call that the request named ends with "stop"."""
        return "tool_calls" if self._has_calls and reason == "stop" and not self._parsing.is_named else reason

    def _events(self, text: str, is_last: bool) -> Iterator[Event]:
        """Yield the events that the next text adds, without those that the request excludes."""
        events = list(self._parser.feed(text)) if text else []
        if is_last:
            events += self._parser.finish()
        for event in events:
            if isinstance(event, ReasoningDelta):
                if not self._parsing.shows_reasoning:
                    continue
            elif not isinstance(event, ContentDelta):
                if event.index and not self._parsing.is_parallel:
                    continue
                self._has_calls = True
            yield event

    def _delta(self, event: Event) -> Delta:
        if isinstance(event, ContentDelta):
            return {"content": event.text}
        if isinstance(event, ReasoningDelta):
            return dict.fromkeys(_REASONING, event.text)
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            call_id = event.call_id or _call_id(self._parsing.tool_parser)
            return {"tool_calls": [{"index": event.index, "id": call_id, "type": "function", "function": function}]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _merge(last: Delta, delta: Delta) -> bool:
    """Merge a delta into the last one if both add to the same text; return True if so."""
    if last.keys() != delta.keys():
        return False
    if "tool_calls" not in delta:
        for name, text in delta.items():
            last[name] += text
        return True
    (one,), (other,) = last["tool_calls"], delta["tool_calls"]
    if "id" in one or one["index"] != other["index"]:
        return False
    one["function"]["arguments"] += other["function"]["arguments"]
    return True


def _call_id(tool_parser: str | None) -> str:
    if tool_parser in _SHORT_IDS:
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
