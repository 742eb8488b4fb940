"""Refuses text that is much too long for the engine before time and memory are spent on all its tokens."""

from __future__ import annotations

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.tokenizer import Tokenizer

MIN_CHECKED_CHARS = 100_000
_CHARS_PER_TOKEN = 8  # more than text has; what has more is looked at in larger parts
_GROWTH = 4
_MARGIN = 1.25  # a beginning of more tokens than this cannot become few enough by what follows it
_NORMALIZER_SLACK = 4  # a tokenizer's normalizer may shorten text first, by joining spaces or accents


class LengthCheck:
    """Tokenizing takes about a second for a million characters, and 200 bytes for each. All requests of an engine
    process are read on one thread, so what is refused in the end may not take long, however long it is."""

    def __init__(self, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len
        self._max_token_chars: int | None = None

    def check(self, field: str, text: str, parse_special_tokens: bool = False) -> None:
        """Raise InvalidArgumentError if the text, that of the field, is too long by far."""
        if len(text) <= MIN_CHECKED_CHARS:
            return
        self.check_size(field, len(text))
        num_chars = max(MIN_CHECKED_CHARS, _CHARS_PER_TOKEN * self._max_seq_len)
        while num_chars < len(text):
            num_tokens = len(self._tokenizer.encode(text[:num_chars], parse_special_tokens=parse_special_tokens))
            if num_tokens > _MARGIN * self._max_seq_len:
                raise self._error(
                    field,
                    len(text),
                    f"of which the first {num_chars} are {num_tokens} tokens, the engine takes at most "
                    f"{self._max_seq_len - 1} (max_seq_len {self._max_seq_len} with one token of output); shorten the "
                    "prompt",
                )
            num_chars *= _GROWTH

    def check_size(self, field: str, num_chars: int) -> None:
        """Raise InvalidArgumentError if no text of so many characters is short enough."""
        if num_chars <= MIN_CHECKED_CHARS:
            return
        limit = self._max_seq_len * self._longest_token() * _NORMALIZER_SLACK
        if num_chars > limit:
            raise self._error(
                field, num_chars, f"max_seq_len {self._max_seq_len} leaves room for {limit} at most; shorten the prompt"
            )

    def _error(self, field: str, num_chars: int, why: str) -> InvalidArgumentError:
        """limit: in tokens, as of a prompt whose tokens were counted."""
        value = f"{num_chars} characters"
        return InvalidArgumentError(f"has {value}, {why}", field, value, self._max_seq_len - 1)

    def _longest_token(self) -> int:
        if self._max_token_chars is None:
            tokens = map(self._tokenizer.token, range(self._tokenizer.vocab_size))
            self._max_token_chars = max(len(token or "") for token in tokens)
        return self._max_token_chars
