"""Token ids of words that a request bans or biases, and of what it stops at."""

from __future__ import annotations

from collections.abc import Iterable

from faser_trtllm.models.tokenizer import Tokenizer

_LINE_END = "\n"


def holds_special_tokens(tokenizer: Tokenizer, text: str) -> bool:
    """True if a special token is spelled out in the text."""
    return any(token in text for token in tokenizer.special_tokens.values() if token)


def word_ids(tokenizer: Tokenizer, word: str) -> list[int]:
    """The word as tokens, special ones included."""
    parse = holds_special_tokens(tokenizer, word)
    return tokenizer.encode(word, add_special_tokens=False, parse_special_tokens=parse)


def stop_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """The tokens of each word, as TensorRT-LLM's preprocessing has them."""
    return [tuple(word_ids(tokenizer, word)) for word in words if word]


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """The tokens of each word at the start of a line and after a space, each sequence once.

    Both as they follow a line's end, since SentencePiece's tokenizers put a space before a text of its own.
    """
    before = word_ids(tokenizer, _LINE_END)
    found: dict[tuple[int, ...], None] = {}
    for word in filter(None, words):
        for spelling in (word, f" {word}"):
            ids = word_ids(tokenizer, _LINE_END + spelling)
            follows = ids[: len(before)] == before and len(ids) > len(before)
            found[tuple(ids[len(before) :] if follows else word_ids(tokenizer, spelling))] = None
    return [ids for ids in found if ids]
