"""Cuts the output of a request at its first stop word, or at its first stop sequence of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from faser_trtllm.models.tokenizer import IncrementalDetokenizer
from faser_trtllm.serving.text.stop_words import StopWordFinder, StopWords


class StoppingText:
    """Detokenized text up to the first stop word; text is released once it cannot be part of a stop word.

    A token is released with its last character, and a token that overlaps the stop word is not output. If the output
    leaves special tokens out, stop words with special tokens are searched in a text that spells them out.
    Stop words in the first min_tokens tokens are ignored. num_tokens counts the tokens searched, up to the one that
    completed a stop word.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stop_words: StopWords | None,
        min_tokens: int,
        spelled_words: StopWords | None = None,
        spellings: Mapping[int, str] | None = None,
    ) -> None:
        """spelled_words: stop words with special tokens, None if the text has these. spellings: id -> special token."""
        self._detokenizer = detokenizer
        self._finder = None if stop_words is None else StopWordFinder(stop_words)
        self._spelled_finder = None if spelled_words is None else StopWordFinder(spelled_words)
        self._spellings: Mapping[int, str] = {} if spelled_words is None or spellings is None else spellings
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self._held = ""  # text with spellings; positions are characters of the whole output with spellings
        self._hidden: list[tuple[int, int]] = []  # (first, end) of spellings in the held text, adjacent ones merged
        self._held_ids: list[tuple[int, int]] = []  # token id and its end position, after the character that it begins
        self._end = 0
        self._free_text: list[str] = []
        self._free_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> bool:
        """Add tokens; return True if they complete a stop word. Tokens after it are dropped."""
        if self._finder is None:
            if token_ids:
                self._free_text.append(self._detokenizer.push(token_ids))
                self._free_ids += token_ids
            return False
        for token in token_ids:
            self.num_tokens += 1
            hidden = self._spellings.get(token, "")
            text = hidden or self._detokenizer.push([token])
            if self._add(text, token, self.num_tokens <= self._min_tokens, bool(hidden)):
                return True
        return False

    def finish(self) -> bool:
        """Release all text, including the detokenizer's rest; return True if the rest completes a stop word."""
        rest = self._detokenizer.finish()
        if self._finder is None:
            self._free_text.append(rest)
            return False
        if rest and self._add(rest, None, self.num_tokens <= self._min_tokens):
            return True
        self._release(self._end)
        return False

    def take(self) -> tuple[str, list[int]]:
        """Return the text and tokens released since the last call."""
        text, token_ids = "".join(self._free_text), self._free_ids
        self._free_text, self._free_ids = [], []
        return text, token_ids

    def _add(self, text: str, token: int | None, ignore: bool, is_hidden: bool = False) -> bool:
        first = self._end
        self._held += text
        self._end += len(text)
        if token is not None:
            begins = not is_hidden and self._detokenizer.is_within_character
            self._held_ids.append((token, self._end + begins))
        if is_hidden:
            if self._hidden and self._hidden[-1][1] == first:
                first = self._hidden.pop()[0]
            self._hidden.append((first, self._end))
        found = self._find(text, ignore, is_hidden)
        self._release(self._first_held() if found is None else found)
        return found is not None

    def _find(self, text: str, ignore: bool, is_hidden: bool) -> int | None:
        """Return the start of the stop word that is complete first in the new text, of several the longest; or None."""
        assert self._finder is not None
        found = []
        begin = self._end - len(text)
        if not is_hidden:
            match = self._finder.push(text, ignore)
            if match is not None:
                num_read, length = match
                found.append((num_read, self._shown_before(begin + num_read, length)))
        if self._spelled_finder is not None:
            match = self._spelled_finder.push(text, ignore)
            if match is not None:
                num_read, length = match
                found.append((num_read, begin + num_read - length))
        return min(found)[1] if found else None

    def _first_held(self) -> int:
        """Return the position from which the held text may be the start of a stop word."""
        assert self._finder is not None
        held = self._shown_before(self._end, self._finder.num_held)
        return held if self._spelled_finder is None else min(held, self._end - self._spelled_finder.num_held)

    def _shown_before(self, end: int, num_shown: int) -> int:
        """Return the start of the last num_shown characters before `end`, not counting spellings."""
        place = end - num_shown
        for first, last in reversed(self._hidden):
            if last <= place:
                break
            place -= last - first
        return place

    def _release(self, end: int) -> None:
        """Release the text and the tokens before this position."""
        begin = self._end - len(self._held)
        if end > begin:
            text, self._held = self._held[: end - begin], self._held[end - begin :]
            if self._hidden:
                text = self._shown(text, begin)
                self._hidden = [(max(first, end), last) for first, last in self._hidden if last > end]
            self._free_text.append(text)
        num_ids = 0
        while num_ids < len(self._held_ids) and self._held_ids[num_ids][1] <= end:
            self._free_ids.append(self._held_ids[num_ids][0])
            num_ids += 1
        del self._held_ids[:num_ids]

    def _shown(self, text: str, begin: int) -> str:
        """Remove the spellings from a text that begins at this position."""
        pieces, place = [], 0
        for first, last in self._hidden:
            pieces.append(text[place : first - begin])
            place = last - begin
        return "".join([*pieces, text[place:]])


def token_text(token_ids: Sequence[int]) -> str:
    """Return a text with one character per token id, since a StopWordFinder reads characters."""
    return "".join(map(chr, token_ids))


class StoppingTokens:
    """Token ids up to the first stop sequence, released once they cannot be part of one; produces no text.

    num_tokens counts the tokens searched, up to the one that completed a stop sequence.
    """

    def __init__(self, stop_sequences: StopWords | None, min_tokens: int) -> None:  # sequences as token_text()
        self._finder = None if stop_sequences is None else StopWordFinder(stop_sequences)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self._held_ids: list[int] = []
        self._free_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> bool:
        """Add tokens; return True if they complete a stop sequence. Tokens after it are dropped."""
        if self._finder is None:
            self._free_ids += token_ids
            return False
        for token in token_ids:
            self.num_tokens += 1
            found = self._finder.push(chr(token), self.num_tokens <= self._min_tokens)
            self._held_ids.append(token)
            self._release(self._finder.num_held if found is None else found[1])
            if found is not None:
                return True
        return False

    def finish(self) -> bool:
        """Release all tokens; return False, since this completes no stop sequence."""
        self._release(0)
        return False

    def take(self) -> tuple[str, list[int]]:
        """Return an empty text and the token ids released since the last call."""
        token_ids, self._free_ids = self._free_ids, []
        return "", token_ids

    def _release(self, num_kept: int) -> None:
        num_free = len(self._held_ids) - num_kept
        self._free_ids += self._held_ids[:num_free]
        del self._held_ids[:num_free]
