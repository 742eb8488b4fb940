"""Finds stop words in text that arrives in pieces, with an Aho-Corasick automaton."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopWords:
    """The automaton of some words, which any number of finders share."""

    children: tuple[dict[str, int], ...]
    suffix: tuple[int, ...]  # longest proper suffix of the state that is also a state
    depth: tuple[int, ...]  # characters of the state
    match: tuple[int, ...]  # length of the longest stop word that ends in the state, 0 if none

    @staticmethod
    def of(words: Iterable[str]) -> StopWords | None:
        """None if no word has a character."""
        words = [word for word in words if word]
        return _build(words) if words else None


class StopWordFinder:
    """Reads characters and tells how much text can no longer be part of a stop word.

    The word that is complete first wins; among words that end at the same character, the longest. So the result does
    not depend on how the text is split.
    """

    def __init__(self, words: StopWords) -> None:
        self._automaton = words
        self._state = 0

    @property
    def num_held(self) -> int:
        """Number of trailing characters that may be the start of a stop word."""
        return self._automaton.depth[self._state]

    def push(self, text: str, ignore: bool = False) -> tuple[int, int] | None:
        """Read text up to the first stop word: (characters read, length of the word), or None without a stop word.

        ignore: skip words that end within this text (min_tokens is not reached yet).
        """
        automaton = self._automaton
        children, suffix, match = automaton.children, automaton.suffix, automaton.match
        state = self._state
        for i, char in enumerate(text):
            while state and char not in children[state]:
                state = suffix[state]
            state = children[state].get(char, 0)
            if match[state] and not ignore:
                self._state = state
                return i + 1, match[state]
        self._state = state
        return None


def _build(words: list[str]) -> StopWords:
    children: list[dict[str, int]] = [{}]
    depth, match = [0], [0]
    for word in words:
        state = 0
        for char in word:
            if char not in children[state]:
                children[state][char] = len(children)
                depth.append(depth[state] + 1)
                children.append({})
                match.append(0)
            state = children[state][char]
        match[state] = len(word)
    suffix = [0] * len(children)
    queue = deque(children[0].values())
    while queue:
        state = queue.popleft()
        for char, child in children[state].items():
            queue.append(child)
            shorter = suffix[state]
            while shorter and char not in children[shorter]:
                shorter = suffix[shorter]
            suffix[child] = children[shorter].get(char, 0)
            match[child] = match[child] or match[suffix[child]]
    return StopWords(tuple(children), tuple(suffix), tuple(depth), tuple(match))
