"""Requests and outputs of text generation, as frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from faser_trtllm.core.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.guided.spec import GuideSpec, guide_spec

MAX_STOP_WORDS = 64
MAX_WORD_CHARS = 1024
MAX_WORDS = 1024
MAX_LOGITS_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One prompt, as text or as token ids (exactly one of the two), and what to do with it.

    Sampling fields mean the same as in SamplingParams.
    max_tokens: if prompt and max_tokens together exceed the engine's max_seq_len, the request is served and ends there
    with finish reason "length", as TensorRT-LLM does.
    stop_words: text that ends the output and is not part of it, however it is split into tokens.
    bad_words: words whose tokens are never produced, neither at the start of a line nor after a space.
    embedding_bias_words, embedding_bias_weights: the weight is added to the logits of the word's tokens.
    end_ids: None uses the tokenizer's; with () the output runs to max_tokens.
    stream: True returns deltas of the output. False returns one answer: prompt and output, as TensorRT-LLM does, or
    only the output with exclude_input_in_output.
    priority: 0 to 1, higher runs sooner. timeout_ms: the request is ended if it has not finished by then.
    detokenize: False returns token ids without text; use stop_token_ids instead of stop_words then.
    stop_token_ids: token sequences that end the output and are not part of it.
    bad_token_ids, logit_bias: sequences never produced; (token id, value) added to the logits. Both add to bad_words
    and embedding_bias_words.
    return_log_probs, normalize_log_probs, return_context_log_probs, num_top_log_probs, return_generation_logits: as in
    SamplingParams; logits of at most MAX_LOGITS_BYTES per request.
    return_is_draft: return for each output token whether it was an accepted draft.
    return_statistics: return the statistics so far with every output, not only with the last.
    drafters: names of those that may draft for it, with commas between them; None: all that the server has.
    guided_decoding_guide_type, guided_decoding_guide: constraints on the output, see guided/spec.py.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
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
    stop_words: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    embedding_bias_words: tuple[str, ...] = ()
    embedding_bias_weights: tuple[float, ...] = ()
    end_ids: tuple[int, ...] | None = None
    num_draft_tokens: int | None = None
    drafters: str | None = None
    stream: bool = True
    exclude_input_in_output: bool = False
    priority: float = 0.5
    timeout_ms: float | None = None
    detokenize: bool = True
    stop_token_ids: tuple[tuple[int, ...], ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    return_log_probs: bool = False
    normalize_log_probs: bool = False
    return_context_log_probs: bool = False
    num_top_log_probs: int = 0
    return_generation_logits: bool = False
    return_is_draft: bool = False
    return_statistics: bool = False
    guided_decoding_guide_type: str | None = None
    guided_decoding_guide: str | None = None

    def validate(self) -> None:
        """Raise InvalidArgumentError for what can be checked without tokenizer and engine.

        Prompt tokens and sampling values are checked by the executor (executor/admission.py).
        """
        if self.text is None and self.token_ids is None:
            raise InvalidArgumentError("the prompt is missing, send text_input or input_ids")
        if self.text is not None and self.token_ids is not None:
            raise InvalidArgumentError("text_input and input_ids were both sent, send one of them")
        _check_words("stop_words", self.stop_words, MAX_STOP_WORDS)
        _check_words("bad_words", self.bad_words, MAX_WORDS)
        _check_words("embedding_bias_words", self.embedding_bias_words, MAX_WORDS)
        if len(self.embedding_bias_words) != len(self.embedding_bias_weights):
            raise InvalidArgumentError(
                f"embedding_bias_words has {len(self.embedding_bias_words)} entries and "
                f"embedding_bias_weights {len(self.embedding_bias_weights)}, send one weight for each word"
            )
        if self.detokenize and self.stop_token_ids:
            raise InvalidArgumentError("stop_token_ids is for requests without text, send stop_words instead")
        if not self.detokenize and self.stop_words:
            raise InvalidArgumentError("stop_words needs text, send token ids to stop at instead")
        # Clients send these three as tensors of these names.
        _check_count("stop_words_list", len(self.stop_token_ids), MAX_STOP_WORDS)
        _check_count("bad_words_list", len(self.bad_token_ids), MAX_BAD_WORDS)
        _check_count("embedding_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        if not 0.0 <= self.priority <= 1.0:
            raise InvalidArgumentError(f"priority is {self.priority}, allowed is 0 to 1 (higher runs sooner)")
        if self.timeout_ms is not None and not 0.0 < self.timeout_ms <= 86_400_000.0:
            raise InvalidArgumentError(
                f"timeout_ms is {self.timeout_ms}, allowed is more than 0 and at most 86400000 (a day)"
            )

    def guide(self) -> GuideSpec | None:
        """What the output must look like, None for any text; raises InvalidArgumentError."""
        return guide_spec(self.guided_decoding_guide_type, self.guided_decoding_guide)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts and times of one request. A time is None if the request ended before that point.

    *_ms: since its arrival. *_time_ns: of this machine's monotonic clock. num_reused_blocks: KV cache blocks found when
    the request was admitted; num_new_blocks: blocks allocated after that.
    """

    num_input_tokens: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_pruned_rows: int
    num_cached_tokens: int
    num_steps: int
    queue_ms: float | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    num_reused_blocks: int = 0
    num_new_blocks: int = 0
    arrival_time_ns: int = 0
    first_scheduled_time_ns: int | None = None
    first_token_time_ns: int | None = None
    last_token_time_ns: int | None = None
    is_synthetic: bool = False  # synthetic_acceptance was on: the output is not the target's

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / draft tokens; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class TopLogProbs:
    """The most probable tokens of some places, best first: ids int32 and log_probs fp32, each [num_places, num_top] in
    C order."""

    ids: bytes = b""
    log_probs: bytes = b""

    @staticmethod
    def join(parts: Sequence[TopLogProbs]) -> TopLogProbs:
        """Those of all parts' places, one behind the other."""
        return TopLogProbs(b"".join(part.ids for part in parts), b"".join(part.log_probs for part in parts))


@dataclass(frozen=True, slots=True)
class ContextLogProbs:
    """Of a prompt: its tokens, the log probs of all but the first, and the most probable tokens in those places."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    tops: TopLogProbs


@dataclass(frozen=True, slots=True)
class TextOutput:
    """New text and its tokens.

    The last output has statistics and a finish reason: "stop", "length", "cancelled", "timeout" or "error". With
    return_statistics every output has statistics.
    error: a sentence, only with "error" and "timeout". error_code: the Triton status of "error".
    log_probs, tops: of the token ids. logits: [len(token_ids), vocab_size] fp32 in C order. All are empty unless
    requested. context: with the first output of a request that asks for it.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    statistics: Statistics | None = None
    error: str | None = None
    log_probs: tuple[float, ...] = ()
    logits: bytes = b""
    error_code: str = "INTERNAL"
    is_draft: tuple[bool, ...] = ()
    tops: TopLogProbs = TopLogProbs()
    context: ContextLogProbs | None = None

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidArgumentError(f"{name} has {count} entries, allowed are at most {limit}")


def _check_words(name: str, words: tuple[str, ...], limit: int) -> None:
    _check_count(name, len(words), limit)
    for word in words:
        if len(word) > MAX_WORD_CHARS:
            raise InvalidArgumentError(
                f"{name} holds a word of {len(word)} characters, allowed are at most {MAX_WORD_CHARS}"
            )
