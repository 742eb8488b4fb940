"""One request's sampling parameters; token ids only, no text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from faser_trtllm.core.guide import Guide
from faser_trtllm.errors import InvalidArgumentError

MAX_BAD_WORDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_TOP_LOG_PROBS = 20


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
class SamplingParams:
    """Sampling parameters with TensorRT-LLM's names; None means "not given".

    temperature: below MIN_TEMPERATURE is greedy, and so is top_k == 1. Not given it is 1 if top_k > 1, top_p or min_p
    is given, else 0.
    top_k: keep the k most probable tokens; 0 is off.
    top_p: in (0, 1]; keep the smallest set of tokens whose probability reaches it.
    min_p: in [0, 1); drop tokens less probable than min_p x the most probable.
    seed: the same seed, prompt and parameters give the same text, whatever the speculation, the batch or the load.
    repetition_penalty, presence_penalty, frequency_penalty: over prompt and output, as TensorRT-LLM counts.
    bad_words: token sequences that are never completed. logit_bias: (token id, value) added to the logits.
    end_ids: tokens that end the request (finish reason "stop"); the end token is not part of the output.
    num_draft_tokens: maximum draft tokens per step; 0 turns speculation off; None leaves it to the policy.
    drafters: names of those that may draft for the request, of those that the server drafts with; None: all.
    return_log_probs: keep the log probability of every output token under the target's distribution after penalties,
    bias and temperature (1 where that is not given or below MIN_TEMPERATURE), over the whole vocabulary: before top_k,
    top_p and min_p.
    normalize_log_probs: use the distribution that the token was tested against or drawn from instead: also after those
    three, so 0.0 for a greedy request.
    return_context_log_probs: keep the log probability of every prompt token but the first, under the target's
    distribution as it is: at temperature 1, without any edit. Such a prompt is computed whole, whatever the KV cache
    has of it.
    num_top_log_probs: keep the most probable tokens, up to this many, beside each log probability.
    return_generation_logits: keep the target's logits of every output token, before any edit.
    guide: constrains the output; a token that it does not allow has probability 0, for draft and target.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    end_ids: tuple[int, ...] = ()
    num_draft_tokens: int | None = None
    drafters: tuple[str, ...] | None = None
    return_log_probs: bool = False
    normalize_log_probs: bool = False
    return_context_log_probs: bool = False
    num_top_log_probs: int = 0
    return_generation_logits: bool = False
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
    def is_greedy(self) -> bool:
        return self.effective_temperature == 0.0

    @property
    def mode(self) -> SamplingMode:
        if self.is_greedy:
            return SamplingMode.GREEDY
        return SamplingMode.SAMPLED if self.seed is None else SamplingMode.SEEDED

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidArgumentError, naming field, value and limit, if anything is out of range."""
        _in_range("max_tokens", self.max_tokens, 1, 2**31 - 1, "1 or more")
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens, "0 to max_tokens")
        if self.temperature is not None:
            _in_range("temperature", self.temperature, 0.0, 100.0, "0 (greedy) to 100")
        if self.top_k is not None:
            _in_range("top_k", self.top_k, 0, 2**31 - 1, "0 (off) or more")
        if self.top_p is not None:
            _in_range("top_p", self.top_p, 0.0, 1.0, "more than 0 and at most 1", open_low=True)
        if self.min_p is not None:
            _in_range("min_p", self.min_p, 0.0, 1.0, "0 (off) to less than 1", open_high=True)
        if self.seed is not None:
            _in_range("seed", self.seed, 0, 2**64 - 1, "0 to 2^64 - 1")
        _in_range(
            "repetition_penalty",
            self.repetition_penalty,
            0.0,
            100.0,
            "more than 0 and at most 100",
            open_low=True,
        )
        _in_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _in_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.num_draft_tokens is not None:
            _in_range("num_draft_tokens", self.num_draft_tokens, 0, 2**31 - 1, "0 (speculation off) or more")
        _in_range("num_top_log_probs", self.num_top_log_probs, 0, MAX_TOP_LOG_PROBS)
        if self.num_top_log_probs and not (self.return_log_probs or self.return_context_log_probs):
            raise InvalidArgumentError(
                f"num_top_log_probs is {self.num_top_log_probs} without log probs that they stand beside; send "
                "return_log_probs or return_context_log_probs too"
            )
        check_token_ids("end_id", self.end_ids, vocab_size)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidArgumentError(
                f"bad_words has {len(self.bad_words)} entries, allowed are at most {MAX_BAD_WORDS}"
            )
        for word in self.bad_words:
            if not word:
                raise InvalidArgumentError("bad_words holds an empty word, each needs at least one token")
            check_token_ids("bad_words", word, vocab_size)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidArgumentError(
                f"logit_bias has {len(self.logit_bias)} entries, allowed are at most {MAX_LOGIT_BIAS}"
            )
        check_token_ids("logit_bias", [token for token, _ in self.logit_bias], vocab_size)
        for token, value in self.logit_bias:
            if not math.isfinite(value):
                raise InvalidArgumentError(f"logit_bias of token {token} is {value}, it must be a finite number")


def _in_range(
    name: str,
    value: float,
    low: float,
    high: float,
    allowed: str | None = None,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    inside = (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
    if not inside:  # also catches NaN, which compares false
        raise InvalidArgumentError(f"{name} is {value}, allowed is {allowed or f'{low} to {high}'}")


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidArgumentError, naming the field, if a token id is not in the vocabulary."""
    if len(token_ids) == 0:
        return
    for token in (min(token_ids), max(token_ids)):
        if not 0 <= token < vocab_size:
            raise InvalidArgumentError(f"{name} holds token id {token}, the vocabulary has ids 0 to {vocab_size - 1}")
