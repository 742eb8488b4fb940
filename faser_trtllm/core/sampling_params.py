"""One request's sampling parameters; token ids only, no text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import chain
from typing import Any

import numpy as np

from faser_trtllm.core.guide import Guide
from faser_trtllm.core.request_field import MAX_INT32, Bounds, check_bounds, param, rows
from faser_trtllm.errors import InvalidArgumentError

MAX_BAD_WORDS = 1024
MAX_BAD_TOKENS = 16 << 10  # of all bad words: a step looks at each of them
MAX_LOGIT_BIAS = 4096
MAX_ALLOWED_TOKENS = 16 << 10
MAX_TOP_LOG_PROBS = 20
MAX_SALT_CHARS = 256


class SamplingMode(IntEnum):
    """How tokens are drawn, and therefore when a draft is accepted: greedy if it is the target's argmax, seeded if it
    is the target's Gumbel-max draw with the same noise, sampled with probability min(1, p/q).

    faser_sampling_mode in plugins/cpu/faser_cpu.h."""

    GREEDY = 0
    SEEDED = 1
    SAMPLED = 2


NUM_MODES = len(SamplingMode)


MIN_TEMPERATURE = 1e-3
"""Below it the target's most probable token is taken: clients send 1e-6 to mean that, and logits / 1e-6 overflow."""


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """The sampling parameters that a request and the engine spell alike, with TensorRT-LLM's names; None is "not
    given"."""

    max_tokens: int = param(
        16,
        "tokens to generate at most; prompt and output together end at the engine's `max_seq_len`",
        bounds=Bounds(1, MAX_INT32),
        openai="max_tokens",
        trtllm="request_output_len",
    )
    min_tokens: int = param(
        0,
        "tokens before an end token, a stop word or the end of a guide may end the output",
        bounds=Bounds(0, MAX_INT32),
        openai="min_tokens",
        older_name="min_length",
    )
    temperature: float | None = param(
        None,
        "divides the logits; 0, and anything below 0.001, takes the most probable token",
        bounds=Bounds(0.0, 100.0, words="0 (greedy) to 100"),
        openai="temperature",
        openai_bounds=Bounds(0.0, 2.0),
    )
    top_k: int | None = param(
        None,
        "keep the k most probable tokens; 0 is off, 1 is greedy",
        bounds=Bounds(0, MAX_INT32, words="0 (off) or more"),
        openai="top_k",
        openai_bounds=Bounds(-1, MAX_INT32, words="0 or -1 (off) or more"),
        trtllm="runtime_top_k",
    )
    top_p: float | None = param(
        None,
        "keep the smallest set of tokens whose probability reaches it",
        bounds=Bounds(0.0, 1.0, above_low=True),
        openai="top_p",
        trtllm="runtime_top_p",
    )
    min_p: float | None = param(
        None,
        "drop tokens less probable than this times the most probable",
        bounds=Bounds(0.0, 1.0, below_high=True, words="0 (off) to less than 1"),
        openai="min_p",
    )
    seed: int | None = param(
        None,
        "the same seed, prompt and parameters give the same text, whatever the speculation, the batch or the load",
        bounds=Bounds(0, 2**64 - 1, words="0 to 2^64 - 1"),
        openai="seed",
        openai_bounds=Bounds(-(2**63), 2**64 - 1, words="-2^63 to 2^64 - 1"),
        older_name="random_seed",
    )
    repetition_penalty: float = param(
        1.0,
        "divides positive logits of tokens of prompt and output, multiplies negative ones, as in TensorRT-LLM",
        bounds=Bounds(0.0, 100.0, above_low=True),
        openai="repetition_penalty",
    )
    presence_penalty: float = param(
        0.0,
        "subtracted from the logits of tokens of prompt and output, as in TensorRT-LLM (OpenAI counts the output only)",
        bounds=Bounds(-100.0, 100.0),
        openai="presence_penalty",
        openai_bounds=Bounds(-2.0, 2.0),
    )
    frequency_penalty: float = param(
        0.0,
        "the same, times how often the token has occurred",
        bounds=Bounds(-100.0, 100.0),
        openai="frequency_penalty",
        openai_bounds=Bounds(-2.0, 2.0),
    )
    allowed_token_ids: tuple[int, ...] | None = param(
        None,
        f"no other tokens may come, end tokens included; at most {MAX_ALLOWED_TOKENS}. A guide allows fewer",
        openai="allowed_token_ids",
    )
    num_draft_tokens: int | None = param(
        None,
        "draft tokens per step at most; 0 turns speculation off, not given the policy decides",
        bounds=Bounds(0, MAX_INT32, words="0 (speculation off) or more"),
        openai="num_draft_tokens",
    )
    cache_salt: str | None = param(
        None,
        "the request reuses the KV cache of requests with the same salt only, and only they reuse its own; at most "
        f"{MAX_SALT_CHARS} characters. Without one it shares with all others that have none, and the number of cached "
        "tokens tells what they have sent",
        openai="cache_salt",
    )
    cache_salt_id: int | None = param(
        None,
        "the same as a number, as TensorRT-LLM's executor has it; requests share if both salts are equal",
        bounds=Bounds(0, 2**64 - 1, words="0 to 2^64 - 1"),
    )
    return_log_probs: bool = param(
        False,
        "return the log probability of every output token under the target's distribution after penalties, bias and "
        "temperature (1 if that is not given or below 0.001), over the whole vocabulary: before any filter",
    )
    return_context_log_probs: bool = param(
        False,
        "return the log probability of every prompt token but the first, under the target's own distribution: at "
        "temperature 1, without any edit. Such a prompt is computed whole, whatever the KV cache has of it",
    )
    num_top_log_probs: int = param(
        0,
        "the most probable tokens to return with each log probability, up to this many",
        bounds=Bounds(0, MAX_TOP_LOG_PROBS),
    )
    return_generation_logits: bool = param(
        False, "return the target's logits of every output token, before any edit; at most 32 MiB per request"
    )
    client_key: str = ""
    """Who sent the request: clients of one priority get equal shares of the engine while they wait for it."""
    normalize_log_probs: bool = False
    """Use the distribution that the token was tested against or drawn from instead: also after top_k, top_p and the
    like, so 0.0 for a greedy request."""

    def sampling_fields(self) -> dict[str, Any]:
        """The fields of this class by name."""
        return {field.name: getattr(self, field.name) for field in fields(SamplingFields)}


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingFields):
    """A request's parameters as the engine has them; token ids only.

    bad_words: token sequences that are never completed. logit_bias: (token id, value) added to the logits.
    end_ids: tokens that end the request (finish reason "stop"); the end token is not part of the output.
    drafters: names of those that may draft for the request, of those that the server drafts with; None: all.
    prediction: token ids that the output is expected to repeat, where drafts come from.
    guide: constrains the output; a token that it does not allow has probability 0, for draft and target.
    """

    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    end_ids: tuple[int, ...] = ()
    drafters: tuple[str, ...] | None = None
    prediction: Sequence[int] = ()
    guide: Guide | None = None

    @property
    def effective_temperature(self) -> float:
        if self.top_k == 1:
            return 0.0
        if self.temperature is not None:
            return self.temperature if self.temperature >= MIN_TEMPERATURE else 0.0
        return 1.0 if self.top_k or self.top_p is not None or self.min_p is not None else 0.0

    @property
    def log_prob_temperature(self) -> float:
        """The temperature of reported log probs."""
        return self.temperature if self.temperature is not None and self.temperature >= MIN_TEMPERATURE else 1.0

    @property
    def salt(self) -> str:
        """The root of the request's chain of KV blocks: requests share blocks if it is the same. "" without salts."""
        if self.cache_salt is None and self.cache_salt_id is None:
            return ""
        return f"{'' if self.cache_salt_id is None else self.cache_salt_id}:{self.cache_salt or ''}"

    @property
    def is_greedy(self) -> bool:
        return self.effective_temperature == 0.0

    @property
    def mode(self) -> SamplingMode:
        if self.is_greedy:
            return SamplingMode.GREEDY
        return SamplingMode.SAMPLED if self.seed is None else SamplingMode.SEEDED

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidArgumentError, naming field, value and limit, if anything is out of range."""
        check_bounds(self, rows(SamplingFields))
        Bounds(0, self.max_tokens, words="0 to max_tokens").check("min_tokens", self.min_tokens)
        check_count("cache_salt", len(self.cache_salt or ""), MAX_SALT_CHARS, "characters")
        if self.num_top_log_probs and not (self.return_log_probs or self.return_context_log_probs):
            raise InvalidArgumentError(
                f"is {self.num_top_log_probs} without log probs that they go with; send return_log_probs or "
                "return_context_log_probs too",
                "num_top_log_probs",
                self.num_top_log_probs,
                0,
            )
        if self.allowed_token_ids is not None:
            check_allowed(self.allowed_token_ids)
            check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        check_token_ids("end_id", self.end_ids, vocab_size)
        check_count("bad_words", len(self.bad_words), MAX_BAD_WORDS)
        if not all(self.bad_words):
            raise InvalidArgumentError("holds an empty word, each needs at least one token", "bad_words", "", "1 token")
        check_count("bad_words", sum(map(len, self.bad_words)), MAX_BAD_TOKENS, "tokens")
        check_token_ids("bad_words", list(chain.from_iterable(self.bad_words)), vocab_size)
        check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        check_token_ids("logit_bias", [token for token, _ in self.logit_bias], vocab_size)
        for token, value in self.logit_bias:
            if not math.isfinite(value):
                raise InvalidArgumentError(
                    f"of token {token} is {value}, it must be a finite number", "logit_bias", value, "finite"
                )


def check_allowed(token_ids: Sequence[int]) -> None:
    """Raise InvalidArgumentError for too many allowed tokens, or none."""
    check_count("allowed_token_ids", len(token_ids), MAX_ALLOWED_TOKENS)
    if not len(token_ids):
        raise InvalidArgumentError(
            "is empty, so that no token could come; leave it out", "allowed_token_ids", "", "1 token"
        )


def check_count(field: str, count: int, limit: int, what: str = "entries") -> None:
    """Raise InvalidArgumentError if a field has more entries than limit."""
    if count > limit:
        raise InvalidArgumentError(f"has {count} {what}, allowed are at most {limit}", field, count, limit)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidArgumentError, naming the field, if a token id is not in the vocabulary."""
    if len(token_ids) == 0:
        return
    ids = np.asarray(token_ids)
    for token in (int(ids.min()), int(ids.max())):
        if not 0 <= token < vocab_size:
            raise InvalidArgumentError(
                f"holds token id {token}, the vocabulary has ids 0 to {vocab_size - 1}",
                field,
                token,
                f"0 to {vocab_size - 1}",
            )
