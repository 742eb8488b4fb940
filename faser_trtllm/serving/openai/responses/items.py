"""Converts a chat's deltas to the output items of a response, and to events about them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

Event = dict[str, Any]


class Items:
    """The output items of a response: messages, reasoning and function calls. At most one is open at a time."""

    def __init__(self) -> None:
        self._items: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open item
        self._key: object = None  # identifies the open item; None if no item is open

    def add(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a chat's delta."""
        if thought := delta.get("reasoning_content"):
            yield from self._text("reasoning", thought)
        if content := delta.get("content"):
            yield from self._text("message", content)
        for call in delta.get("tool_calls", ()):
            yield from self._call(call)

    def end(self, status: str) -> Iterator[Event]:
        """Close the open item with a status, completed or incomplete, and yield its last events."""
        yield from self._close(status)

    @property
    def output(self) -> list[dict[str, Any]]:
        return self._items

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        is_message = kind == "message"
        if self._key != kind:
            yield from self._close("completed")
            item: dict[str, Any] = {"id": _id("msg" if is_message else "rs"), "type": kind, "status": "in_progress"}
            item["content"] = []
            item["role" if is_message else "summary"] = "assistant" if is_message else []
            yield from self._open(kind, item)
            yield self._event("response.content_part.added", content_index=0, part=self._part(""))
        self._pieces.append(text)
        name = "response.output_text.delta" if is_message else "response.reasoning_text.delta"
        yield self._event(name, content_index=0, delta=text, **self._logprobs())

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        key, function = ("call", call["index"]), call["function"]
        if self._key != key:
            yield from self._close("completed")
            item = {"id": _id("fc"), "type": "function_call", "status": "in_progress", "call_id": call["id"]}
            yield from self._open(key, item | {"name": function["name"], "arguments": ""})
        if arguments := function.get("arguments"):
            self._pieces.append(arguments)
            yield self._event("response.function_call_arguments.delta", delta=arguments)

    def _open(self, key: object, item: dict[str, Any]) -> Iterator[Event]:
        self._key = key
        self._pieces = []
        self._items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": _copy(item)}

    def _close(self, status: str) -> Iterator[Event]:
        if self._key is None:
            return
        item, text = self._items[-1], "".join(self._pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            item["content"] = [self._part(text)]
            name = "response.output_text.done" if item["type"] == "message" else "response.reasoning_text.done"
            yield self._event(name, content_index=0, text=text, **self._logprobs())
            yield self._event("response.content_part.done", content_index=0, part=self._part(text))
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": _copy(item)}
        self._key = None

    def _part(self, text: str) -> dict[str, Any]:
        if self._items[-1]["type"] == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._items[-1]["type"] == "message" else {}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **fields}


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an item. A shallow copy is enough, since its content is replaced and never changed."""
    return dict(item)


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"
