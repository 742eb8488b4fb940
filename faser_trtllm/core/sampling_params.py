"""One request's sampling parameters, with token ids instead of text."""

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
MAX_BAD_TOKENS = 16 << 10  # in all bad words together: each step checks all of them
MAX_LOGIT_BIAS = 4096
MAX_ALLOWED_TOKENS = 16 << 10
MAX_TOP_LOG_PROBS = 20
MAX_SALT_CHARS = 256


class SamplingMode(IntEnum):
    """How tokens are drawn, and therefore when a draft is accepted (faser_sampling_mode in plugins/cpu/faser_cpu.h).

    Greedy drafts are accepted if they are the target's argmax, seeded ones if they are the target's Gumbel-max draw
    with the same noise, sampled ones with probability min(1, p/q).
    """

    GREEDY = 0
    SEEDED = 1
    SAMPLED = 2


NUM_MODES = len(SamplingMode)


MIN_TEMPERATURE = 1e-3
"""Lower temperatures mean greedy: clients send 1e-6 for that, and logits / 1e-6 would overflow."""


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """Parameters that requests and the engine have in common, by TensorRT-LLM's names; None means not given."""

    max_tokens: int = param(
        16,
        "maximum number of tokens to generate; prompt and output together end at the engine's `max_seq_len`",
        bounds=Bounds(1, MAX_INT32),
        openai="max_tokens",
        trtllm="request_output_len",
    )
    min_tokens: int = param(
        0,
        "number of tokens before which no end token or stop word ends the output; complete guides do",
        bounds=Bounds(0, MAX_INT32),
        openai="min_tokens",
        older_name="min_length",
    )
    temperature: float | None = param(
        None,
        "divides the logits; 0, like anything below 0.001, takes the most probable token",
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
        "keep the smallest set of the most probable tokens whose total probability reaches this",
        bounds=Bounds(0.0, 1.0, above_low=True),
        openai="top_p",
        trtllm="runtime_top_p",
    )
    min_p: float | None = param(
        None,
        "drop tokens that are less probable than this times the most probable one",
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
        "divides positive logits of tokens in prompt and output, multiplies negative ones, as in TensorRT-LLM",
        bounds=Bounds(0.0, 100.0, above_low=True),
        openai="repetition_penalty",
    )
    presence_penalty: float = param(
        0.0,
        "subtracted from the logits of tokens in prompt and output, as in TensorRT-LLM (OpenAI counts the output only)",
        bounds=Bounds(-100.0, 100.0),
        openai="presence_penalty",
        openai_bounds=Bounds(-2.0, 2.0),
    )
    frequency_penalty: float = param(
        0.0,
        "the same, times the number of the token's occurrences",
        bounds=Bounds(-100.0, 100.0),
        openai="frequency_penalty",
        openai_bounds=Bounds(-2.0, 2.0),
    )
    allowed_token_ids: tuple[int, ...] | None = param(
        None,
        f"the only tokens that may come, end tokens included; at most {MAX_ALLOWED_TOKENS}. A guide narrows them",
        openai="allowed_token_ids",
    )
    num_draft_tokens: int | None = param(
        None,
        "maximum number of draft tokens per step; 0 turns speculation off, the default leaves it to the policy",
        bounds=Bounds(0, MAX_INT32, words="0 (speculation off) or more"),
        openai="num_draft_tokens",
    )
    cache_salt: str | None = param(
        None,
        "share KV cache only with requests that have the same salt; at most "
        f"{MAX_SALT_CHARS} characters. Requests without a salt share with each other, so their number of cached tokens "
        "reveals what others have sent",
        openai="cache_salt",
    )
    cache_salt_id: int | None = param(
        None,
        "the salt as a number, as in TensorRT-LLM's executor; requests share KV cache if both salts are equal",
        bounds=Bounds(0, 2**64 - 1, words="0 to 2^64 - 1"),
    )
    return_log_probs: bool = param(
        False,
        "return the log probability of every output token under the target's distribution after penalties, bias and "
        "temperature (1 if that is not given or below 0.001), over the whole vocabulary: before any filter",
    )
    return_context_log_probs: bool = param(
        False,
        "return the log probability of every prompt token but the first under the target's own distribution, at "
        "temperature 1 and without any edit. The whole prompt is then computed, even if its KV cache is there",
    )
    num_top_log_probs: int = param(
        0,
        "number of most probable tokens to return with each log probability",
        bounds=Bounds(0, MAX_TOP_LOG_PROBS),
    )
    return_generation_logits: bool = param(
        False, "return the target's logits of every output token, before any edit; at most 32 MiB per request"
    )
    client_key: str = ""
    """Client that sent the request. Waiting clients of the same priority get equal shares of the engine."""
    normalize_log_probs: bool = False
    """Report log probs under the distribution that the token was verified with or drawn from instead: after top_k,
    top_p and the like too, so 0.0 for a greedy request."""

    def sampling_fields(self) -> dict[str, Any]:
        """Return the fields of this class by name."""
        return {field.name: getattr(self, field.name) for field in fields(SamplingFields)}


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingFields):
    """A request's parameters as the engine takes them."""

    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    end_ids: tuple[int, ...] = ()  # tokens that end the request ("stop"); they are not part of the output
    drafters: tuple[str, ...] | None = None  # the server's drafters that may draft for the request; None: all
    prediction: Sequence[int] = ()  # token ids that the output is expected to repeat, a source of drafts
    guide: Guide | None = None  # constrains the output: other tokens get probability 0 from draft and target

    @property
    def effective_temperature(self) -> float:
        if self.top_k == 1:
            return 0.0
        if self.temperature is not None:
            return self.temperature if self.temperature >= MIN_TEMPERATURE else 0.0
        return 1.0 if self.top_k or self.top_p is not None or self.min_p is not None else 0.0

    @property
    def log_prob_temperature(self) -> float:
        """Temperature of reported log probs."""
        return self.temperature if self.temperature is not None and self.temperature >= MIN_TEMPERATURE else 1.0

    @property
    def salt(self) -> str:
        """Salt of the request's KV blocks, "" without one; requests share blocks only if their salts are equal."""
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
        check_token_ids("prediction", self.prediction, vocab_size)
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
                    f"of token {token} is {value}; it must be a finite number", "logit_bias", value, "finite"
                )


def check_allowed(token_ids: Sequence[int]) -> None:
    """Raise InvalidArgumentError if there are no allowed tokens or too many."""
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
