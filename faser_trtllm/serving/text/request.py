"""Requests and outputs of text generation, as frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from faser_trtllm.core.request_field import Bounds, check_bounds, param, rows
from faser_trtllm.core.sampling_params import MAX_BAD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, SamplingFields, check_count
from faser_trtllm.errors import FaserError, InvalidArgumentError
from faser_trtllm.guided.spec import GUIDE_TYPES, GuideSpec, guide_spec
from faser_trtllm.serving.text.acceptance import Acceptance

MAX_STOP_WORDS = 64
MAX_WORD_CHARS = 1024
MAX_WORDS = 1024
MAX_STOP_CHARS = 8 << 10  # of all stop words of a request, or tokens where it has no text
MAX_WORDS_CHARS = 64 << 10  # of all words of another field: they are tokenized before the request runs
MAX_BAD_TEXTS = MAX_BAD_WORDS // 2  # each is banned at the start of a line and after a space
MAX_DRAFTERS_CHARS = 256
MAX_LOGITS_BYTES = 32 << 20
MAX_PREDICTION_CHARS = 64 << 10
DAY_MS = 86_400_000.0


@dataclass(frozen=True, slots=True)
class TextRequest(SamplingFields):
    """One prompt, as text or as token ids (exactly one of the two), and what to do with it.

    A prompt and max_tokens that together exceed the engine's max_seq_len are served and end there with finish reason
    "length", as TensorRT-LLM does.
    stream: True returns deltas of the output, False one answer: prompt and output, as TensorRT-LLM does, or only the
    output with exclude_input_in_output.
    end_ids: None uses the tokenizer's; with () the output runs to max_tokens.
    detokenize: False returns token ids without text; use stop_token_ids instead of stop_words then.
    stop_token_ids: token sequences that end the output and are not part of it.
    bad_token_ids, logit_bias: sequences never produced; (token id, value) added to the logits. Both add to bad_words
    and embedding_bias_words.
    return_statistics: return the statistics so far with every output, not only with the last.
    """

    exclude_input_in_output: bool = param(False, "without `stream`: the answer is the output only")
    stop_words: tuple[str, ...] = param(
        (),
        "texts that end the output and are not part of it, however they are tokenized; special tokens may be among "
        f"them, or in them; at most {MAX_STOP_WORDS} of {MAX_WORD_CHARS} characters, {MAX_STOP_CHARS} together",
        openai="stop",
    )
    bad_words: tuple[str, ...] = param(
        (),
        "words whose tokens, special ones included, are never produced, neither at the start of a line nor after a "
        f"space; at most {MAX_BAD_TEXTS}, of {MAX_WORDS_CHARS} characters and {MAX_BAD_TOKENS} tokens together",
    )
    embedding_bias_words: tuple[str, ...] = param(
        (), "words with a weight in `embedding_bias_weights` each, which is added to the logits of the word's tokens"
    )
    drafters: str | None = param(
        None,
        "names of the drafters that may draft for the request, with commas between them; not given all that the server "
        "has",
        openai="drafters",
    )
    priority: float = param(
        0.5, "requests of a higher one run sooner", bounds=Bounds(0.0, 1.0, words="0 to 1 (higher runs sooner)")
    )
    timeout_ms: float | None = param(
        None,
        "the request is ended if it has not finished by then",
        bounds=Bounds(0.0, DAY_MS, above_low=True, words=f"more than 0 and at most {DAY_MS:.0f} (a day)"),
        openai="timeout_ms",
        openai_bounds=Bounds(1.0, DAY_MS, words=f"1 to {DAY_MS:.0f} (a day)"),
    )
    add_special_tokens: bool = param(
        True,
        "add to the prompt what the tokenizer adds to a text, such as a token that begins it; of a prompt of token ids "
        "nothing changes",
        openai="add_special_tokens",
    )
    parse_special_tokens: bool = param(
        False,
        "read special tokens that the prompt's text spells out, such as those of a chat template that the client has "
        "rendered, as these tokens: whoever writes a part of such a text can forge a turn. TensorRT-LLM's models do so "
        "unless told otherwise",
        openai="parse_special_tokens",
    )
    skip_special_tokens: bool = param(
        True,
        "the text leaves special tokens out; their ids are in the output all the same",
        openai="skip_special_tokens",
    )
    return_is_draft: bool = param(False, "return for each output token whether it was an accepted draft")
    return_acceptance: bool = param(
        False,
        "return with the last response how many drafts each step tested and accepted, and a histogram of the latter",
    )
    prediction: str | None = param(
        None,
        "text that much of the output is expected to repeat, such as a file that it changes a little: its tokens are "
        f"tested as drafts, so it changes how fast the output comes and no token of it; at most {MAX_PREDICTION_CHARS} "
        "characters",
    )
    guided_decoding_guide_type: str | None = param(
        None, f"constrains the output: {', '.join(GUIDE_TYPES)} ([guided decoding](guided_decoding.md))"
    )
    guided_decoding_guide: str | None = param(None, "the schema, regex or grammar")
    text: str | None = None
    token_ids: Sequence[int] | None = None
    stream: bool = True
    embedding_bias_weights: tuple[float, ...] = ()
    end_ids: tuple[int, ...] | None = None
    detokenize: bool = True
    stop_token_ids: tuple[tuple[int, ...], ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    return_statistics: bool = False

    def validate(self) -> None:
        """Raise InvalidArgumentError for what can be checked without tokenizer and engine.

        What goes with the vocabulary and the engine's size is checked by executor/admission.py.
        """
        if self.text is None and self.token_ids is None:
            raise InvalidArgumentError("is missing, send text_input or input_ids", "prompt")
        if self.text is not None and self.token_ids is not None:
            raise InvalidArgumentError("and input_ids were both sent, send one of them", "text_input")
        check_words("stop_words", self.stop_words, MAX_STOP_WORDS, MAX_STOP_CHARS)
        check_words("bad_words", self.bad_words, MAX_BAD_TEXTS)
        check_words("embedding_bias_words", self.embedding_bias_words, MAX_WORDS)
        num_words, num_weights = len(self.embedding_bias_words), len(self.embedding_bias_weights)
        if num_words != num_weights:
            raise InvalidArgumentError(
                f"has {num_words} entries and embedding_bias_weights {num_weights}, send one weight for each word",
                "embedding_bias_words",
                num_words,
                num_weights,
            )
        if self.detokenize and self.stop_token_ids:
            raise InvalidArgumentError("is for requests without text, send stop_words instead", "stop_token_ids")
        if not self.detokenize and self.stop_words:
            raise InvalidArgumentError("needs text, send token ids to stop at instead", "stop_words")
        check_count("drafters", len(self.drafters or ""), MAX_DRAFTERS_CHARS, "characters")
        check_count("prediction", len(self.prediction or ""), MAX_PREDICTION_CHARS, "characters")
        # Clients send these three as tensors of these names.
        check_count("stop_words_list", len(self.stop_token_ids), MAX_STOP_WORDS)
        check_count("bad_words_list", len(self.bad_token_ids), MAX_BAD_WORDS)
        check_count("embedding_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        check_count("stop_words_list", sum(map(len, self.stop_token_ids)), MAX_STOP_CHARS, "tokens")
        check_bounds(self, rows(TextRequest))
        self.guide()

    def guide(self) -> GuideSpec | None:
        """The constraints on the output, None for any text; raises InvalidArgumentError."""
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
    num_predicted: int = 0  # accepted drafts from the request's prediction
    num_mispredicted: int = 0  # those that were rejected, or dropped with one that was
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


@dataclass(frozen=True, slots=True)
class ContextLogProbs:
    """The tokens of a prompt, the log probs of all but the first, and the most probable tokens in those places."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    tops: TopLogProbs


@dataclass(frozen=True, slots=True)
class TextOutput:
    """New text and its tokens.

    The last output has statistics and a finish reason: "stop", "length", "cancelled", "timeout" or "error". With
    return_statistics every output has statistics.
    error: why it ended, only with "error" and "timeout".
    log_probs, tops: of the token ids. logits: [len(token_ids), vocab_size] fp32 in C order. All are empty unless
    requested. context: with the first output of a request that asks for it, acceptance: with the last.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    statistics: Statistics | None = None
    error: FaserError | None = None
    log_probs: tuple[float, ...] = ()
    logits: bytes = b""
    is_draft: tuple[bool, ...] = ()
    tops: TopLogProbs = TopLogProbs()
    context: ContextLogProbs | None = None
    acceptance: Acceptance | None = None

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


def check_words(field: str, words: Sequence[str], limit: int, max_chars: int = MAX_WORDS_CHARS) -> None:
    """Raise InvalidArgumentError if there are more words than limit, one is longer than MAX_WORD_CHARS, or all together
    are longer than max_chars."""
    check_count(field, len(words), limit)
    num_chars = max(map(len, words), default=0)
    if num_chars > MAX_WORD_CHARS:
        raise InvalidArgumentError(
            f"holds a word of {num_chars} characters, allowed are at most {MAX_WORD_CHARS}",
            field,
            num_chars,
            MAX_WORD_CHARS,
        )
    check_count(field, sum(map(len, words)), max_chars, "characters")
