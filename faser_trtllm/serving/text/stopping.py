"""The output of a request up to its stop: text up to a stop word, token ids up to a stop sequence."""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.models.tokenizer import IncrementalDetokenizer
from faser_trtllm.serving.text.stop_words import StopWordFinder, StopWords


class StoppingText:
    """Detokenized text up to the first stop word; text is released once it cannot be part of a stop word.

    A token is released with its last character. A token that overlaps the stop word is not part of the output.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop_words: StopWords | None, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._finder = None if stop_words is None else StopWordFinder(stop_words)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self._held_ids: list[tuple[int, int]] = []  # token id, characters of the whole output up to its end
        self._end = 0  # characters of the whole output
        self._free_text: list[str] = []
        self._free_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> bool:
        """Add tokens; True if they complete a stop word. The tokens after it are dropped."""
        if self._finder is None:
            if token_ids:
                self._free_text.append(self._detokenizer.push(token_ids))
                self._free_ids += token_ids
            return False
        for token in token_ids:
            self._num_tokens += 1
            if self._add(self._detokenizer.push([token]), token, self._num_tokens <= self._min_tokens):
                return True
        return False

    def finish(self) -> bool:
        """Release everything, including the detokenizer's rest; True if that completes a stop word."""
        rest = self._detokenizer.finish()
        if self._finder is None:
            self._free_text.append(rest)
            return False
        if rest and self._add(rest, None, self._num_tokens <= self._min_tokens):
            return True
        self._release(0)
        return False

    def take(self) -> tuple[str, list[int]]:
        """What was released since the last call."""
        text, token_ids = "".join(self._free_text), self._free_ids
        self._free_text, self._free_ids = [], []
        return text, token_ids

    def _add(self, text: str, token: int | None, ignore: bool) -> bool:
        assert self._finder is not None
        found = self._finder.push(text, ignore)
        if found is not None:
            num_read, word_len = found
            self._held += text[:num_read]
            self._end += num_read
            if token is not None:
                self._held_ids.append((token, self._end + len(text) - num_read))
            self._release(word_len)
            return True
        self._held += text
        self._end += len(text)
        if token is not None:
            self._held_ids.append((token, self._end))
        self._release(self._finder.num_held)
        return False

    def _release(self, num_kept: int) -> None:
        num_free = len(self._held) - num_kept
        if num_free:
            self._free_text.append(self._held[:num_free])
            self._held = self._held[num_free:]
        limit = self._end - num_kept
        num_ids = 0
        while num_ids < len(self._held_ids) and self._held_ids[num_ids][1] <= limit:
            self._free_ids.append(self._held_ids[num_ids][0])
            num_ids += 1
        del self._held_ids[:num_ids]


def token_text(token_ids: Sequence[int]) -> str:
    """A text with a character for each token id, since a StopWordFinder reads characters."""
    return "".join(map(chr, token_ids))


class StoppingTokens:
    """Token ids up to the first stop sequence, released once they cannot be part of one; produces no text."""

    def __init__(self, stop_sequences: StopWords | None, min_tokens: int) -> None:
        """stop_sequences: of token_text()."""
        self._finder = None if stop_sequences is None else StopWordFinder(stop_sequences)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held_ids: list[int] = []
        self._free_ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> bool:
        """Add tokens; True if they complete a stop sequence. The tokens after it are dropped."""
        if self._finder is None:
            self._free_ids += token_ids
            return False
        for token in token_ids:
            self._num_tokens += 1
            found = self._finder.push(chr(token), self._num_tokens <= self._min_tokens)
            self._held_ids.append(token)
            self._release(self._finder.num_held if found is None else found[1])
            if found is not None:
                return True
        return False

    def finish(self) -> bool:
        """Release everything. Returns False, because that cannot complete a stop sequence."""
        self._release(0)
        return False

    def take(self) -> tuple[str, list[int]]:
        """The token ids released since the last call, with an empty text."""
        token_ids, self._free_ids = self._free_ids, []
        return "", token_ids

    def _release(self, num_kept: int) -> None:
        num_free = len(self._held_ids) - num_kept
        self._free_ids += self._held_ids[:num_free]
        del self._held_ids[:num_free]
