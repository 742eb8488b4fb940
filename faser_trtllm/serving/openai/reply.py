"""Builds OpenAI's JSON answers, whole or as chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from faser_trtllm.models.tokenizer import IncrementalDetokenizer, Tokenizer
from faser_trtllm.serving.openai.model import Delta
from faser_trtllm.serving.openai.request import GenerationRequest
from faser_trtllm.serving.text.finish_reason import SYNTHETIC

_MIN_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say
_FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop", "timeout": "length"}


class Reply:
    """Collects the deltas of a request's sequences and formats them."""

    def __init__(self, request: GenerationRequest, model_name: str, tokenizer: Tokenizer | None) -> None:
        num_sequences = len(request.prompts) * request.num_choices
        self.id = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._request = request
        self._head = {"id": self.id, "created": int(time.time()), "model": model_name}
        self._choices = [_Choice(request, tokenizer) for _ in range(num_sequences)]

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream, after all deltas were added."""
        kind = "chat.completion" if self._request.is_chat else "text_completion"
        choices = [choice.whole(index) for index, choice in enumerate(self._choices)]
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    def add(self, index: int, delta: Delta) -> None:
        """Add a delta to the whole answer."""
        self._note(delta)
        self._choices[index].add(delta)

    def first_chunks(self) -> list[dict[str, Any]]:
        """The first chunks of a stream: for chats, the role of the speaker."""
        if not self._request.is_chat:
            return []
        return [
            self._chunk([_chat_chunk(index, {"role": "assistant", "content": ""}, None, None)])
            for index in range(len(self._choices))
        ]

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a delta; empty if it adds nothing visible yet."""
        self._note(delta)
        return [self._chunk([piece]) for piece in self._choices[index].chunks(index, delta)]

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunk after all deltas: the usage, if requested."""
        return [self._chunk([]) | {"usage": self._usage()}] if self._request.include_usage else []

    def _note(self, delta: Delta) -> None:
        if delta.is_synthetic:
            self._head["system_fingerprint"] = SYNTHETIC

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._request.is_chat else "text_completion"
        usage: dict[str, Any] = {}
        if self._request.include_usage:
            usage["usage"] = self._usage() if self._request.usage_per_chunk else None
        return {**self._head, "object": kind, "choices": choices, **usage}

    def _usage(self) -> dict[str, Any]:
        """Token counts so far; a prompt counts once for all its choices."""
        firsts = self._choices[:: self._request.num_choices]
        num_input_tokens = sum(choice.num_input_tokens for choice in firsts)
        num_output_tokens = sum(choice.num_output_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_input_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_input_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in firsts)},
        }


class _Choice:
    """One sequence."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        self._is_chat = request.is_chat
        self._logprobs = _Logprobs(tokenizer, request.is_chat) if request.logprobs and tokenizer is not None else None
        self._texts: list[str] = []
        self._entries: list[_Entry] = []
        self._finish_reason: str | None = None
        self.num_input_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        if self._logprobs is not None:
            self._entries += self._logprobs.entries(delta)
        self._count(delta)

    def whole(self, index: int) -> dict[str, Any]:
        text = "".join(self._texts)
        logprobs = None if self._logprobs is None else self._logprobs.spell(self._entries)
        rest = {"index": index, "logprobs": logprobs, "finish_reason": self._finish_reason}
        if self._is_chat:
            return {"message": {"role": "assistant", "content": text, "refusal": None}, **rest}
        return {"text": text, **rest}

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        self._count(delta)
        entries = [] if self._logprobs is None else self._logprobs.entries(delta)
        logprobs = None if self._logprobs is None or not entries else self._logprobs.spell(entries)
        has_content = bool(delta.text or entries)
        if not self._is_chat:
            reason = self._finish_reason
            rest = {"index": index, "logprobs": logprobs, "finish_reason": reason}
            return [{"text": delta.text, **rest}] if has_content or reason else []
        pieces = [_chat_chunk(index, {"content": delta.text}, logprobs, None)] if has_content else []
        if self._finish_reason is not None:
            pieces.append(_chat_chunk(index, {}, None, self._finish_reason))
        return pieces

    def _count(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._finish_reason = _FINISH_REASONS.get(delta.finish_reason, "stop")
        if delta.finish_reason is not None or delta.num_output_tokens:
            self.num_input_tokens = delta.num_input_tokens
            self.num_output_tokens = delta.num_output_tokens
            self.num_cached_tokens = delta.num_cached_tokens


class _Entry:
    """A token: the text it completes, its log prob, and the offset of that text in the output."""

    __slots__ = ("logprob", "offset", "text")

    def __init__(self, text: str, logprob: float, offset: int) -> None:
        self.text = text
        self.logprob = logprob
        self.offset = offset


class _Logprobs:
    """The tokens of one sequence in OpenAI's format.

    A token's text is what it adds to the output: a token that ends inside a character adds nothing, the token that
    completes the character adds it. So the texts, and their bytes, concatenate to the output.
    """

    def __init__(self, tokenizer: Tokenizer, is_chat: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._is_chat = is_chat
        self._offset = 0

    def entries(self, delta: Delta) -> list[_Entry]:
        found = []
        for token, log_prob in zip(delta.token_ids, delta.log_probs, strict=True):
            text = self._detokenizer.push([token])
            found.append(_Entry(text, max(log_prob, _MIN_LOGPROB), self._offset))
            self._offset += len(text)
        return found

    def spell(self, entries: Sequence[_Entry]) -> dict[str, Any]:
        if self._is_chat:
            content = [
                {
                    "token": entry.text,
                    "logprob": entry.logprob,
                    "bytes": list(entry.text.encode()),
                    "top_logprobs": [],
                }
                for entry in entries
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{entry.text: entry.logprob} for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }


def encode(value: Any) -> bytes:
    """JSON as ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"


def _chat_chunk(index: int, delta: dict[str, str], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
