"""Builds OpenAI's JSON answers, whole or as chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from typing import Any

from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.client import Response
from faser_trtllm.serving.openai.chat.answer import Answer
from faser_trtllm.serving.openai.drafts.records import metrics, prediction_usage
from faser_trtllm.serving.openai.error import RequestError
from faser_trtllm.serving.openai.logprobs import Entry, Logprobs
from faser_trtllm.serving.openai.request import GenerationRequest
from faser_trtllm.serving.openai.served_model import Prompt
from faser_trtllm.serving.text.finish_reason import SYNTHETIC, read_finish

MAX_LOGPROBS = 1 << 20  # in an answer that is not streamed, including alternatives: about 200 MB while it is built
_PADDED = b',"obfuscation":"%s"'
_EVENT_BYTES = len(b"data: \n\n") - len(b"%s")
_FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop", "timeout": "length"}


class Reply:
    """Collects the deltas of a request's sequences and formats them."""

    def __init__(self, request: GenerationRequest, model_name: str, tokenizer: Tokenizer | None) -> None:
        self.id = f"{'chatcmpl' if request.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._request = request
        self._head = {"id": self.id, "created": int(time.time()), "model": model_name}
        self._num_logprobs = 0
        self._choices = [_Choice(request, prompt, tokenizer) for prompt, _ in request.sequences()]

    def whole(self) -> dict[str, Any]:
        """Return the whole answer; call it after add() got all deltas."""
        kind = "chat.completion" if self._request.is_chat else "text_completion"
        choices = [choice.whole(index) for index, choice in enumerate(self._choices)]
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(), **self._metrics()}

    def add(self, index: int, delta: Response) -> None:
        """Add a delta to the whole answer; raise RequestError if it becomes too large."""
        self._note(delta)
        if self._request.logprobs is not None:
            num_tokens = len(delta.token_ids) + (0 if delta.context is None else len(delta.context.token_ids))
            self._num_logprobs += num_tokens * (1 + self._request.logprobs)
            if self._num_logprobs > MAX_LOGPROBS:
                raise RequestError(
                    f"asks for more than {MAX_LOGPROBS} log probabilities in this answer, counting alternatives; send "
                    "fewer prompts, lower logprobs, or stream the answer",
                    "logprobs",
                )
        self._choices[index].add(delta)

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the first chunks of a stream: one per choice with the role in chats, else none."""
        if not self._request.is_chat:
            return []
        return [
            self._chunk([_chat_chunk(index, {"role": "assistant", "content": ""}, None, None)])
            for index in range(len(self._choices))
        ]

    def chunks(self, index: int, delta: Response) -> list[dict[str, Any]]:
        """Return the chunks of a delta; empty if it adds nothing visible yet."""
        self._note(delta)
        found = [self._chunk([piece]) for piece in self._choices[index].chunks(index, delta)]
        if found and delta.is_final and not self._request.options.include_usage:
            found[-1] |= self._metrics()
        return found

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the chunk with the usage that ends a stream, if requested."""
        if not self._request.options.include_usage:
            return []
        return [self._chunk([]) | {"usage": self._usage(), **self._metrics()}]

    def _note(self, delta: Response) -> None:
        if read_finish(delta.finish_reason or "")[1]:
            self._head["system_fingerprint"] = SYNTHETIC

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._request.is_chat else "text_completion"
        usage: dict[str, Any] = {}
        if self._request.options.include_usage:
            usage["usage"] = self._usage() if self._request.options.usage_per_chunk else None
        return {**self._head, "object": kind, "choices": choices, **usage}

    def _metrics(self) -> dict[str, Any]:
        return metrics(self._request.spec_decode_metrics, self._choices[0].final)

    def _usage(self) -> dict[str, Any]:
        """Return token counts so far; a prompt counts once for all its choices."""
        size = self._request.num_choices
        prompts = [self._choices[first : first + size] for first in range(0, len(self._choices), size)]
        # Sequences of a prompt report its length, each with its first response.
        num_input_tokens = sum(max(choice.num_input_tokens for choice in choices) for choices in prompts)
        num_output_tokens = sum(choice.num_output_tokens for choice in self._choices)
        details = prediction_usage(choice.final for choice in self._choices)
        return {
            "prompt_tokens": num_input_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_input_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choices[0].num_cached_tokens for choices in prompts)},
            **({"completion_tokens_details": details} if details else {}),
        }


class _Choice:
    """Formats the deltas of one sequence."""

    def __init__(self, request: GenerationRequest, prompt: Prompt, tokenizer: Tokenizer | None) -> None:
        self._is_chat = request.is_chat
        self._skips_special_tokens = bool(request.inputs.get("skip_special_tokens", True))
        self._only_prompt = request.only_prompt
        self._tokenizer = tokenizer
        self._prompt = prompt if request.echo else None  # None after it was echoed
        self._logprobs: Logprobs | None = None
        if request.logprobs is not None and tokenizer is not None:
            self._logprobs = Logprobs(tokenizer, request.is_chat, prompt, request.inputs)
        self._texts: list[str] = []
        self._answer = None if request.parsing is None else Answer(request.parsing)
        self._entries: list[Entry] = []
        self._finish_reason: str | None = None
        self.final: Response | None = None
        self.num_input_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens = 0

    def add(self, delta: Response) -> None:
        text, entries = self._added(delta)
        if self._answer is None:
            self._texts.append(text)
        else:
            self._answer.add(text, delta.is_final)
        self._entries += entries
        self._count(delta)

    def whole(self, index: int) -> dict[str, Any]:
        text = "".join(self._texts)
        logprobs = None if self._logprobs is None else self._logprobs.spell(self._entries)
        rest = {"index": index, "logprobs": logprobs, "finish_reason": self._finish_reason}
        if self._answer is not None:
            return {"message": self._answer.message(), **rest}
        if self._is_chat:
            return {"message": {"role": "assistant", "content": text, "refusal": None}, **rest}
        return {"text": text, **rest}

    def chunks(self, index: int, delta: Response) -> list[dict[str, Any]]:
        text, entries = self._added(delta)
        deltas = self._deltas(text, delta.is_final)
        self._count(delta)
        logprobs = None if self._logprobs is None or not entries else self._logprobs.spell(entries)
        has_content = bool(text or entries)
        if not self._is_chat:
            reason = self._finish_reason
            rest = {"index": index, "logprobs": logprobs, "finish_reason": reason}
            return [{"text": text, **rest}] if has_content or reason else []
        if entries and not deltas:
            deltas = [{"content": ""}]
        pieces = [_chat_chunk(index, found, None if i else logprobs, None) for i, found in enumerate(deltas)]
        if self._finish_reason is not None:
            pieces.append(_chat_chunk(index, {}, None, self._finish_reason))
        return pieces

    def _deltas(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """Return the deltas that a text adds to a chat's message."""
        if self._answer is not None:
            return self._answer.deltas(text, is_last)
        return [{"content": text}] if text else []

    def _added(self, delta: Response) -> tuple[str, list[Entry]]:
        """Return the text and entries that a delta adds to the answer; the first delta also adds an echoed prompt."""
        text, entries = "", []
        if self._prompt is not None:
            text, self._prompt = self._text_of(self._prompt), None
            if self._logprobs is not None and delta.context is not None:
                entries = self._logprobs.of_context(delta.context, text)
        if not self._only_prompt:
            text += delta.text
            entries += [] if self._logprobs is None else self._logprobs.of_output(delta)
        return text, entries

    def _text_of(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        assert self._tokenizer is not None, "the request was refused"
        return self._tokenizer.decode(prompt, skip_special_tokens=self._skips_special_tokens)

    def _count(self, delta: Response) -> None:
        if delta.finish_reason is not None:
            self.final = delta
            reason = "length" if self._only_prompt else read_finish(delta.finish_reason)[0]
            reason = _FINISH_REASONS.get(reason, "stop")
            self._finish_reason = reason if self._answer is None else self._answer.finish_reason(reason)
        if delta.finish_reason is not None or delta.num_output_tokens:
            self.num_input_tokens = delta.num_input_tokens or 0
            self.num_output_tokens = 0 if self._only_prompt else delta.num_output_tokens or 0
            self.num_cached_tokens = delta.num_cached_tokens or 0


def encode(value: Any) -> bytes:
    """Encode a value as JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def event(value: Any, padding: int = 0) -> bytes:
    """Encode a server-sent event.

    padding: make the size a multiple of this many bytes, with random characters in a field `obfuscation` like in
    OpenAI's events; 0 for none.
    """
    data = encode(value)
    if padding:
        num_missing = -(len(data) + _EVENT_BYTES + len(_PADDED)) % padding
        data = data[:-1] + _PADDED % secrets.token_urlsafe(num_missing)[:num_missing].encode() + b"}"
    return b"data: " + data + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"


def _chat_chunk(index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
