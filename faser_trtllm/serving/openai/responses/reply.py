"""Builds the answers of /v1/responses from a chat's chunks, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any

from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.client import Response
from faser_trtllm.serving.openai.reply import Reply, event
from faser_trtllm.serving.openai.request import GenerationRequest
from faser_trtllm.serving.openai.responses.items import Event, Items
from faser_trtllm.serving.openai.responses.request import ResponsesRequest

_BEGUN = ("created", "in_progress")


class ResponsesReply:
    """Converts the chunks of a chat with one sequence to a response or its events."""

    def __init__(self, request: GenerationRequest, model_name: str, tokenizer: Tokenizer | None) -> None:
        assert isinstance(request, ResponsesRequest)
        self._chat = Reply(request, model_name, tokenizer)
        self._items = Items()
        self._finish_reason: str | None = None
        self._num_events = len(_BEGUN)  # first_chunks() numbers these events itself
        self.id = f"resp_{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": "response", "created_at": int(time.time()), "model": model_name}
        self._head |= {"error": None, **request.echoed}

    def add(self, index: int, delta: Response) -> None:
        """Add a delta to the whole answer."""
        self.chunks(index, delta)

    def whole(self) -> dict[str, Any]:
        """Return the whole answer; call it after add() got all deltas."""
        return self._response(self._status)

    def first_chunks(self) -> list[Event]:
        begun = self._response("in_progress")
        return [{"type": f"response.{kind}", "response": begun, "sequence_number": i} for i, kind in enumerate(_BEGUN)]

    def chunks(self, index: int, delta: Response) -> list[Event]:
        """Return the events of a delta."""
        found: list[Event] = []
        for chunk in self._chat.chunks(index, delta):
            for choice in chunk["choices"]:
                found += self._items.add(choice["delta"])
                self._finish_reason = choice["finish_reason"] or self._finish_reason
        if delta.is_final:
            found += self._items.end(self._status)
        return self._numbered(found)

    def last_chunks(self) -> list[Event]:
        """Return the event that ends the response."""
        status = self._status
        return self._numbered([{"type": f"response.{status}", "response": self._response(status)}])

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        has_ended = status != "in_progress"
        (last,) = self._chat.last_chunks()
        told = ("metrics", "system_fingerprint") if has_ended else ()
        more: dict[str, Any] = {name: last[name] for name in told if name in last}
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._items.output) if has_ended else [],
            "usage": _usage(last["usage"]) if has_ended else None,
            **more,
        }

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        found = [{**value, "sequence_number": self._num_events + i} for i, value in enumerate(events)]
        self._num_events += len(found)
        return found


def named_event(value: Event, padding: int = 0) -> bytes:
    """Encode a server-sent event with its name; the line of the name is not padded."""
    return f"event: {value['type']}\n".encode() + event(value, padding)


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Convert token counts; reasoning tokens are not counted separately."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
