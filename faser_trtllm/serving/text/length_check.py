"""Refuses text that is much too long for the engine before all of it is tokenized."""

from __future__ import annotations

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.tokenizer import Tokenizer

MIN_CHECKED_CHARS = 100_000
_CHARS_PER_TOKEN = 8  # more than usual; for text with more, the checked prefix grows by _GROWTH
_GROWTH = 4
_MARGIN = 1.25  # text that follows a prefix never reduces the prefix's token count by this factor
_NORMALIZER_SLACK = 4  # a tokenizer's normalizer may first shorten text, for example by joining spaces or accents


class LengthCheck:
    """Checks the length of texts quickly, since reading one request must not hold up the others.

    Tokenizing a million characters takes about a second, and 200 bytes of memory for each character.
    """

    def __init__(self, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len
        self._max_token_chars: int | None = None

    def check(self, field: str, text: str, parse_special_tokens: bool = False) -> None:
        """Raise InvalidArgumentError, about `field`, if the text is far too long."""
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
                    f"of which the first {num_chars} are {num_tokens} tokens; the engine takes at most "
                    f"{self._max_seq_len - 1} (max_seq_len {self._max_seq_len} with one token of output); shorten the "
                    "prompt",
                )
            num_chars *= _GROWTH

    def check_size(self, field: str, num_chars: int) -> None:
        """Raise InvalidArgumentError, about `field`, if every text of num_chars characters is too long."""
        if num_chars <= MIN_CHECKED_CHARS:
            return
        limit = self._max_seq_len * self._longest_token() * _NORMALIZER_SLACK
        if num_chars > limit:
            raise self._error(
                field, num_chars, f"max_seq_len {self._max_seq_len} leaves room for {limit} at most; shorten the prompt"
            )

    def _error(self, field: str, num_chars: int, why: str) -> InvalidArgumentError:
        value = f"{num_chars} characters"
        return InvalidArgumentError(f"has {value}, {why}", field, value, self._max_seq_len - 1)

    def _longest_token(self) -> int:
        if self._max_token_chars is None:
            tokens = map(self._tokenizer.token, range(self._tokenizer.vocab_size))
            self._max_token_chars = max(len(token or "") for token in tokens)
        return self._max_token_chars
