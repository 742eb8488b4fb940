"""Finds stop words in text that arrives in pieces, with an Aho-Corasick automaton."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopWords:
    """The automaton of a set of words, which finders share; it takes 8 bytes and a character per state.

    A state is a prefix of a word. States are numbered by length, then by characters, so the states that extend a state
    by one character are a range: first[state] to first[state + 1].
    """

    chars: str  # last character of each state
    first: array[int]
    suffix: array[int]  # longest proper suffix of the state that is also a state
    depth: array[int]  # characters in the state
    match: array[int]  # length of the longest stop word that ends in the state, 0 if none

    @staticmethod
    def of(words: Iterable[str]) -> StopWords | None:
        """Build the automaton; None if all words are empty. The words must have fewer than 2^16 characters together."""
        known = sorted({word for word in words if word})
        return _build(known) if known else None


class StopWordFinder:
    """Finds the first stop word in text that it reads piece by piece.

    The word that is complete first wins; among words that end at the same character, the longest. The result therefore
    does not depend on how the text is split.
    """

    def __init__(self, words: StopWords) -> None:
        self._automaton = words
        self._beginnings = words.chars[words.first[0] : words.first[1]]
        self._state = 0

    @property
    def num_held(self) -> int:
        """Number of trailing characters that may be the start of a stop word."""
        return self._automaton.depth[self._state]

    def push(self, text: str, ignore: bool = False) -> tuple[int, int] | None:
        """Read text up to the first stop word; return (characters read, length of the word), or None.

        With `ignore`, skip words that end within this text (min_tokens is not reached yet).
        """
        words, beginnings = self._automaton, self._beginnings
        chars, first, suffix, match = words.chars, words.first, words.suffix, words.match
        state = self._state
        for i, char in enumerate(text):
            if state or char in beginnings:
                state = _next(chars, first, suffix, state, char)
                if match[state] and not ignore:
                    self._state = state
                    return i + 1, match[state]
        self._state = state
        return None


def _next(chars: Sequence[str], first: Sequence[int], suffix: Sequence[int], state: int, char: str) -> int:
    """Return the state after one more character."""
    while True:
        begin, end = first[state], first[state + 1]
        if begin < end:
            found = begin if end - begin == 1 else bisect_left(chars, char, begin, end)
            if found < end and chars[found] == char:
                return found
        if not state:
            return 0
        state = suffix[state]


def _build(words: list[str]) -> StopWords:
    """Build the automaton of words that are sorted, distinct and not empty."""
    chars, first = ["\0"], array("H")  # the empty state has no last character
    suffix, depth, match = array("H", [0]), array("H", [0]), array("H", [0])
    spans = [(0, len(words))]  # for each state, the range of words that begin with it
    for state, (begin, end) in enumerate(spans):  # the loop appends to spans
        length = depth[state]
        first.append(len(spans))
        if length and len(words[begin]) == length:  # the state is itself a word, and sorts before its extensions
            begin += 1
        while begin < end:
            char, same = words[begin][length], begin + 1
            while same < end and words[same][length] == char:
                same += 1
            shorter = _next(chars, first, suffix, suffix[state], char) if state else 0
            chars.append(char)
            spans.append((begin, same))
            suffix.append(shorter)
            depth.append(length + 1)
            match.append(length + 1 if len(words[begin]) == length + 1 else match[shorter])
            begin = same
    first.append(len(spans))
    return StopWords("".join(chars), first, suffix, depth, match)
