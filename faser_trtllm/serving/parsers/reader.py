"""A reader of text that arrives in pieces.

Parsers are generators: a parser that needs more text yields, and continues once there is more text or the text has
ended. Parsers can therefore be written as if they had the whole text, and no decision depends on where pieces end.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

SPACE = " \t\r\n"
_NO_SPACE = re.compile(f"[^{SPACE}]")


class MalformedError(Exception):
    """The text is not what was expected."""


class EndOfTextError(Exception):
    """The text ends before what was expected."""


class Marks:
    """Texts to look for, which begin with the same character."""

    def __init__(self, *marks: str) -> None:
        self._first = marks[0][0]
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._beginnings = frozenset(mark[:length] for mark in marks for length in range(1, len(mark)))
        self._max_begun = max(map(len, marks)) - 1

    def find(self, text: str, start: int) -> tuple[int, bool]:
        """Return (position, True) of the first mark, or (position, False) from where on the text may become a mark."""
        found = self._pattern.search(text, start)
        if found is not None:
            return found.start(), True
        place = text.find(self._first, max(start, len(text) - self._max_begun))
        while place >= 0 and text[place:] not in self._beginnings:
            place = text.find(self._first, place + 1)
        return (place if place >= 0 else len(text)), False


class Reader:
    """The text that has arrived and is not yet taken: text[at:].

    Text taken while the reader holds can be returned, such as the beginning of a call that turns out not to be one.
    """

    __slots__ = ("_held", "at", "has_ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.has_ended = False
        self._held: list[str] | None = None

    def add(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def more(self) -> Reading[None]:
        """Wait for more text; raise EndOfTextError."""
        if self.has_ended:
            raise EndOfTextError
        yield

    def take(self, end: int) -> str:
        """Take and return text[at:end]."""
        piece = self.text[self.at : end]
        self.at = end
        if self._held is not None and piece:
            self._held.append(piece)
        return piece

    @property
    def is_holding(self) -> bool:
        return self._held is not None

    def hold(self) -> None:
        """Keep the text taken from here on."""
        self._held = []

    def forget(self) -> None:
        """Drop the kept text and stop keeping it."""
        self._held = None

    def release(self) -> str:
        """Return the text taken since hold(), "" after forget()."""
        held, self._held = self._held, None
        return "".join(held or ())

    def peek(self) -> Reading[str]:
        """Take white space and return the character after it, which is not taken. Raises EndOfTextError."""
        while True:
            found = _NO_SPACE.search(self.text, self.at)
            self.take(len(self.text) if found is None else found.start())
            if found is not None:
                return found.group()
            yield from self.more()

    def accept(self, mark: str) -> Reading[bool]:
        """Take white space, and the mark if it follows; return True if it did. May raise EndOfTextError inside it."""
        if not self.text.startswith(mark, self.at):
            yield from self.peek()
        while True:
            piece = self.text[self.at : self.at + len(mark)]
            if piece == mark:
                self.take(self.at + len(mark))
                return True
            if not mark.startswith(piece):
                return False
            yield from self.more()

    def expect(self, mark: str) -> Reading[None]:
        """Take white space and the mark. Raises MalformedError or EndOfTextError."""
        if not (yield from self.accept(mark)):
            raise MalformedError

    def until(self, end: str, max_chars: int) -> Reading[str]:
        """Take the text before the character `end`. Raises MalformedError if it is too long, or EndOfTextError."""
        while (place := self.text.find(end, self.at, self.at + max_chars + 1)) < 0:
            if len(self.text) - self.at > max_chars:
                raise MalformedError
            yield from self.more()
        return self.take(place)
