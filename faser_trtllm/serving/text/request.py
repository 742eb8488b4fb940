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
MAX_STOP_CHARS = 8 << 10  # in all stop words of a request together; counts tokens if the request has no text
MAX_WORDS_CHARS = 64 << 10  # in all words of any other field together: they are tokenized before the request runs
MAX_BAD_TEXTS = MAX_BAD_WORDS // 2  # each text is banned at the start of a line and after a space
MAX_DRAFTERS_CHARS = 256
MAX_LOGITS_BYTES = 32 << 20
MAX_PREDICTION_CHARS = 64 << 10
DAY_MS = 86_400_000.0


@dataclass(frozen=True, slots=True)
class TextRequest(SamplingFields):
    """One prompt, as text or as token ids (exactly one of the two), and how to answer it.

    If the prompt and max_tokens together exceed the engine's max_seq_len, the output ends there with finish reason
    "length", as in TensorRT-LLM.

    stream: True returns deltas of the output; False returns one answer, the prompt and the output as in TensorRT-LLM,
        or with exclude_input_in_output the output only.
    end_ids: None uses the tokenizer's; with () the output runs to max_tokens.
    detokenize: False returns token ids without text; use stop_token_ids instead of stop_words then.
    stop_token_ids: token sequences that end the output and are not part of it.
    bad_token_ids: token sequences never produced, in addition to bad_words.
    logit_bias: (token id, value) pairs added to the logits, in addition to embedding_bias_words.
    return_statistics: return the statistics so far with every output, not only with the last.
    """

    exclude_input_in_output: bool = param(False, "without `stream`, return the output without the prompt")
    stop_words: tuple[str, ...] = param(
        (),
        "texts that end the output and are not part of it, however they are tokenized; they may have special tokens; "
        f"at most {MAX_STOP_WORDS} of {MAX_WORD_CHARS} characters each, {MAX_STOP_CHARS} characters together",
        openai="stop",
    )
    bad_words: tuple[str, ...] = param(
        (),
        "words that are never produced, neither at the start of a line nor after a space; they may contain special "
        f"tokens; at most {MAX_BAD_TEXTS}, of {MAX_WORDS_CHARS} characters and {MAX_BAD_TOKENS} tokens together",
    )
    embedding_bias_words: tuple[str, ...] = param(
        (), "words whose tokens get a bias: `embedding_bias_weights` has the value for each word, added to the logits"
    )
    drafters: str | None = param(
        None,
        "names of the drafters that may draft for the request, separated by commas; by default all that the server has",
        openai="drafters",
    )
    priority: float = param(
        0.5, "requests with a higher priority run sooner", bounds=Bounds(0.0, 1.0, words="0 to 1 (higher runs sooner)")
    )
    timeout_ms: float | None = param(
        None,
        "end the request if it has not finished by then",
        bounds=Bounds(0.0, DAY_MS, above_low=True, words=f"more than 0 and at most {DAY_MS:.0f} (a day)"),
        openai="timeout_ms",
        openai_bounds=Bounds(1.0, DAY_MS, words=f"1 to {DAY_MS:.0f} (a day)"),
    )
    add_special_tokens: bool = param(
        True,
        "add the tokens that the tokenizer adds to a text, such as one for its beginning; has no effect on a prompt of "
        "token ids",
        openai="add_special_tokens",
    )
    parse_special_tokens: bool = param(
        False,
        "parse special tokens that the prompt's text spells out, as needed for a chat template that the client has "
        "rendered; anyone who writes part of such a text can forge a turn. TensorRT-LLM's models do this by default",
        openai="parse_special_tokens",
    )
    skip_special_tokens: bool = param(
        True,
        "leave special tokens out of the text; the output ids still contain them",
        openai="skip_special_tokens",
    )
    return_is_draft: bool = param(False, "return for each output token whether it was an accepted draft token")
    return_acceptance: bool = param(
        False,
        "return with the last response the draft tokens tested and accepted in each step, and a histogram of accepted "
        "ones",
    )
    prediction: str | None = param(
        None,
        "text that much of the output is expected to repeat, such as a file with small changes: its tokens are used as "
        f"draft tokens, which affects speed but not the output; at most {MAX_PREDICTION_CHARS} characters",
    )
    guided_decoding_guide_type: str | None = param(
        None, f"kind of the guide that the output must match: {', '.join(GUIDE_TYPES)}"
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
        """Raise InvalidArgumentError for values that are wrong for every tokenizer and engine.

        executor/admission.py checks values that depend on the vocabulary and the engine's limits.
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
        """Return the guide that the output must match, or None; raise InvalidArgumentError."""
        return guide_spec(self.guided_decoding_guide_type, self.guided_decoding_guide)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts and times of one request.

    *_time_ns are times of this machine's monotonic clock, None if the request ended before that point.
    """

    num_input_tokens: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_pruned_rows: int
    num_cached_tokens: int
    num_steps: int
    num_reused_blocks: int = 0  # KV cache blocks found when the request was admitted
    num_new_blocks: int = 0  # KV cache blocks allocated after that
    arrival_time_ns: int = 0
    first_scheduled_time_ns: int | None = None
    first_token_time_ns: int | None = None
    last_token_time_ns: int | None = None
    num_predicted: int = 0  # accepted drafts from the request's prediction
    num_mispredicted: int = 0  # drafts from it that were rejected, or dropped after a rejected one
    is_synthetic: bool = False  # synthetic_acceptance was on: the output is not the target's

    @property
    def acceptance_rate(self) -> float:
        """The ratio of accepted draft tokens to draft tokens; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class TopLogProbs:
    """The most probable tokens at some positions, best first: arrays [num_positions, num_top] in C order."""

    ids: bytes = b""  # int32
    log_probs: bytes = b""  # fp32


@dataclass(frozen=True, slots=True)
class ContextLogProbs:
    """A prompt's tokens. log_probs and tops begin with the second token, since the first has none."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    tops: TopLogProbs


@dataclass(frozen=True, slots=True)
class TextOutput:
    """New text and its tokens.

    The last output has statistics and a finish reason: "stop", "length", "cancelled", "timeout" or "error". All fields
    from log_probs on are empty unless requested.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    statistics: Statistics | None = None  # with return_statistics in every output
    error: FaserError | None = None  # with "error" and "timeout" only
    log_probs: tuple[float, ...] = ()
    logits: bytes = b""  # [len(token_ids), vocab_size] fp32 in C order
    is_draft: tuple[bool, ...] = ()
    tops: TopLogProbs = TopLogProbs()
    context: ContextLogProbs | None = None  # in the first output
    acceptance: Acceptance | None = None  # in the last output

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None


def check_words(field: str, words: Sequence[str], limit: int, max_chars: int = MAX_WORDS_CHARS) -> None:
    """Raise InvalidArgumentError if there are more words than `limit`, or words longer than allowed.

    A word may have MAX_WORD_CHARS characters, all words together max_chars.
    """
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
