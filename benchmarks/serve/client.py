"""A streaming client of an OpenAI server. Requests have only fields of OpenAI's API, and those that the user adds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp

from benchmarks.serve.acceptance import Acceptance, read_counters, read_record
from benchmarks.serve.dataset import Message
from benchmarks.serve.outcome import Outcome
from faser_trtllm.errors import UnavailableError
from faser_trtllm.json_text import parse_json
from faser_trtllm.serving.text.finish_reason import SYNTHETIC

MAX_EVENT_BYTES = 16 << 20
MAX_ANSWER_BYTES = 256 << 20
_MAX_ERROR_CHARS = 300
_PAGE_TIMEOUT = aiohttp.ClientTimeout(total=10.0)

COMPLETIONS, CHAT = "openai", "openai-chat"


class Client:
    """A client of one server and model. backend: COMPLETIONS or CHAT. body: fields of every request."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        backend: str,
        body: dict[str, Any],
        timeout_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self._session = session
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._is_chat = backend == CHAT
        self._url = f"{self._root}/v1/{'chat/completions' if self._is_chat else 'completions'}"
        self._body = body
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self.now_s = now_s

    async def models(self) -> list[str]:
        """Return the server's models; UnavailableError if it does not answer like an OpenAI server."""
        url = f"{self._root}/v1/models"
        try:
            async with self._session.get(url, timeout=_PAGE_TIMEOUT) as response:
                response.raise_for_status()
                return [str(card["id"]) for card in parse_json(await response.read())["data"]]
        except aiohttp.ClientResponseError as error:
            reason = f"HTTP {error.status}"
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
        except (ValueError, KeyError, TypeError):
            reason = "the answer is no list of models"
        raise UnavailableError(f"no OpenAI server answers at {url} ({reason}); start one or correct --base_url")

    async def counters(self) -> Acceptance | None:
        """Return the server's counters of speculation; None if /metrics has none."""
        try:
            async with self._session.get(f"{self._root}/metrics", timeout=_PAGE_TIMEOUT) as response:
                if response.status != 200:
                    return None
                page = await response.content.read(MAX_EVENT_BYTES)
            return read_counters(page.decode(errors="replace"))
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
            return None

    async def ask(self, messages: Sequence[Message], max_tokens: int, outcome: Outcome) -> str:
        """Send a request, record its outcome, and return the text that was received.

        messages: for completions the last one's content is the prompt.
        """
        body = {**self._body, "stream": True, "stream_options": {"include_usage": True}}
        if self._is_chat:
            body |= {"messages": list(messages), "max_completion_tokens": max_tokens}
        else:
            body |= {"prompt": messages[-1]["content"], "max_tokens": max_tokens}
        answer = _Answer(outcome, self.now_s)
        outcome.sent_s = self.now_s()
        try:
            async with self._session.post(self._url, json=body, timeout=self._timeout) as response:
                if response.status != 200:
                    outcome.error = f"HTTP {response.status}: {_message(await response.content.read(1 << 16))}"
                else:
                    async for event in _events(response.content, answer.note_arrival):
                        answer.add(event)
                    answer.check_end()
        except asyncio.TimeoutError:
            outcome.error = f"the request took longer than {self._timeout.total:g} s"
        except (aiohttp.ClientError, OSError) as error:
            outcome.error = f"the connection failed: {error or type(error).__name__}"
        except _AnswerError as error:
            outcome.error = str(error)
        outcome.ended_s = (outcome.error is None and answer.ended_s) or self.now_s()
        return "".join(answer.texts)


class _AnswerError(Exception):
    """Raised for an answer that is wrong."""


class _Answer:
    """A reader of one stream's chunks, which records them in an outcome."""

    def __init__(self, outcome: Outcome, now_s: Callable[[], float]) -> None:
        self._outcome = outcome
        self._now_s = now_s
        self._arrived_s = 0.0
        self._has_finished = False
        self.texts: list[str] = []
        self.ended_s = 0.0  # arrival of the last piece, without the usage

    def note_arrival(self) -> None:
        """Record the time of received bytes, which is that of the chunks that they complete."""
        self._arrived_s = self._now_s()

    def add(self, event: bytes) -> None:
        """Add one event's data; raises _AnswerError."""
        if event == b"[DONE]":
            self._has_finished = True
            return
        try:
            chunk = parse_json(event)
        except ValueError:
            raise _AnswerError(f"an event is no JSON: {event[:60]!r}") from None
        if not isinstance(chunk, dict):
            raise _AnswerError(f"an event is no object: {event[:60]!r}")
        if chunk.get("error") is not None:
            raise _AnswerError(f"the stream failed: {_message(event)}")
        self._outcome.acceptance = read_record(chunk) or self._outcome.acceptance
        self._outcome.is_synthetic |= chunk.get("system_fingerprint") == SYNTHETIC
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._outcome.num_tokens = _count(usage.get("completion_tokens"))
            self._outcome.num_prompt_tokens = _count(usage.get("prompt_tokens"))
        for choice in chunk.get("choices") or ():
            if isinstance(choice, dict):
                self._add_choice(choice)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        if choice.get("finish_reason") is not None:
            self._has_finished = True
            self.ended_s = self._arrived_s
        delta = choice.get("delta")
        parts = delta if isinstance(delta, dict) else choice
        text = parts.get("content") or choice.get("text")
        if isinstance(text, str):
            self.texts.append(text)
        # A chunk with only the role has no token; reasoning and tool calls have.
        if text or any(parts.get(name) for name in ("reasoning_content", "reasoning", "tool_calls")):
            chunks = self._outcome.chunk_s
            if not chunks or chunks[-1] != self._arrived_s:
                chunks.append(self._arrived_s)
            self.ended_s = self._arrived_s

    def check_end(self) -> None:
        if not self._has_finished:
            raise _AnswerError("the stream ended before the answer did")


async def _events(stream: aiohttp.StreamReader, note_arrival: Callable[[], None]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events as they arrive; raises _AnswerError for events that are too large."""
    rest, size = b"", 0
    async for data in stream.iter_any():
        note_arrival()
        size += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(rest) > MAX_EVENT_BYTES or size > MAX_ANSWER_BYTES:
            limits = f"{MAX_EVENT_BYTES >> 20} MiB an event and {MAX_ANSWER_BYTES >> 20} MiB in all"
            raise _AnswerError(f"the answer is beyond {limits}")
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _message(data: bytes) -> str:
    """Return the message of an error in OpenAI's form, else the beginning of the body."""
    try:
        error = json.loads(data)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        text = data.decode(errors="replace")
    return " ".join(str(text).split())[:_MAX_ERROR_CHARS] or "no message"


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
