"""What a client asks of text generation and what it gets back: frozen values, as they cross the socket."""

from __future__ import annotations

import msgspec

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.guided.spec import guide_spec

MAX_STOP_WORDS = 64
MAX_WORD_CHARS = 1024
MAX_WORDS = 1024
MAX_LOGITS_BYTES = 32 << 20


class TextRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One prompt, as text or as token ids (exactly one of the two), and what to do with it.

    Sampling fields have the meaning of SamplingParams. max_tokens: at most the engine's max_seq_len; a
    prompt and max_tokens that together pass max_seq_len are served and end with finish reason "length".
    stop_words: text that ends the output and is not part of it; found wherever tokens are cut.
    bad_words: text never produced as the tokens of the word, at a line's start or after a space.
    embedding_bias_words, embedding_bias_weights: the weight is added to the logits of the word's tokens.
    end_ids: None takes the tokenizer's; () goes on to max_tokens.
    stream: True gives deltas of the output; False gives one answer: prompt and output, as in TensorRT-LLM, or
    the output only if exclude_input_in_output.
    priority: 0 to 1, more is sooner. timeout_ms: the request ends when it has not finished by then.
    detokenize: False gives token ids only, without text; then stop_token_ids takes the place of stop_words.
    stop_token_ids: token sequences that end the output and are not part of it. bad_token_ids: never produced.
    logit_bias: (token id, value) added to the logits. These two add to their spellings in words.
    return_log_probs, normalize_log_probs, return_generation_logits: as in SamplingParams; logits of at most
    MAX_LOGITS_BYTES per request.
    guided_decoding_guide_type, guided_decoding_guide: what the output must look like, as guided/spec.py says.
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
    return_generation_logits: bool = False
    guided_decoding_guide_type: str | None = None
    guided_decoding_guide: str | None = None

    def validate(self) -> None:
        """Raise InvalidArgumentError for what can be judged without a tokenizer or an engine."""
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
        if len(self.stop_token_ids) > MAX_STOP_WORDS:
            raise InvalidArgumentError(
                f"stop_words_list has {len(self.stop_token_ids)} entries, allowed are at most {MAX_STOP_WORDS}"
            )
        if not 0.0 <= self.priority <= 1.0:
            raise InvalidArgumentError(f"priority is {self.priority}, allowed is 0 to 1 (more is sooner)")
        if self.timeout_ms is not None and not 0.0 < self.timeout_ms <= 86_400_000.0:
            raise InvalidArgumentError(
                f"timeout_ms is {self.timeout_ms}, allowed is more than 0 and at most 86400000 (a day)"
            )
        guide_spec(self.guided_decoding_guide_type, self.guided_decoding_guide)


class Statistics(msgspec.Struct, frozen=True):
    """How a request went. Times are None if it ended before that point.

    _ms: from its arrival. _time_ns: of this machine's monotonic clock. Blocks of the KV cache: reused ones were found
    there when the request was admitted, new ones came on top of them by its end.
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
    is_synthetic: bool = False  # drafts were accepted by synthetic_acceptance: the output is not the target's

    @property
    def acceptance_rate(self) -> float:
        """Accepted of drafted tokens, 0 if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


class TextOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """New text and its tokens. The last has statistics and a finish_reason: "stop", "length", "cancelled",
    "timeout" or "error". error is a sentence, given with "error" and "timeout" only; error_code is the Triton status of
    "error". log_probs: one for each of token_ids. logits: of them, [len(token_ids), vocab_size] fp32 in C order. Both
    are empty unless asked for."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    statistics: Statistics | None = None
    error: str | None = None
    log_probs: tuple[float, ...] = ()
    logits: bytes = b""
    error_code: str = "INTERNAL"

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


def _check_words(name: str, words: tuple[str, ...], limit: int) -> None:
    if len(words) > limit:
        raise InvalidArgumentError(f"{name} has {len(words)} entries, allowed are at most {limit}")
    for word in words:
        if len(word) > MAX_WORD_CHARS:
            raise InvalidArgumentError(
                f"{name} holds a word of {len(word)} characters, allowed are at most {MAX_WORD_CHARS}"
            )
