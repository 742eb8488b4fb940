"""Token ids of the words that a request bans, biases or stops at."""

from __future__ import annotations

from collections.abc import Iterable

from faser_trtllm.models.tokenizer import Tokenizer

_LINE_END = "\n"


def holds_special_tokens(tokenizer: Tokenizer, text: str) -> bool:
    """Return True if the text spells out a special token."""
    return any(token in text for token in tokenizer.special_tokens.values() if token)


def word_ids(tokenizer: Tokenizer, word: str) -> list[int]:
    """Return the token ids of a word; special tokens in it are parsed."""
    parse = holds_special_tokens(tokenizer, word)
    return tokenizer.encode(word, add_special_tokens=False, parse_special_tokens=parse)


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the distinct token sequences of the words, each at the start of a line and after a space.

    Words are tokenized after a line break, since SentencePiece tokenizers put a space before the start of a text.
    """
    before = word_ids(tokenizer, _LINE_END)
    found: dict[tuple[int, ...], None] = {}
    for word in filter(None, words):
        for spelling in (word, f" {word}"):
            ids = word_ids(tokenizer, _LINE_END + spelling)
            follows = ids[: len(before)] == before and len(ids) > len(before)
            found[tuple(ids[len(before) :] if follows else word_ids(tokenizer, spelling))] = None
    return [ids for ids in found if ids]
