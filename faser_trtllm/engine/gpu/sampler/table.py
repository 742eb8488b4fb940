"""Sampling table entries for kernels: the host memory that an entry points to, packed for one upload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, int8_at, int32_at

Int32Array = npt.NDArray[np.int32]

_ENTRY_INTS = SAMPLING_DTYPE.itemsize // 4
_LISTS = (
    ("end_ids", "num_end_ids", 0),
    ("bias_ids", "num_bias", 0),
    ("bias_values", "num_bias", 0),
    ("cu_bad_words", "num_bad_words", 1),
)
ADDRESSES = (
    "tokens",
    "draft_probs",
    "draft_margins",
    "draft_candidates",
    "draft_sources",
    "end_ids",
    "bias_ids",
    "bias_values",
    "bad_words",
    "cu_bad_words",
    "masks",
    "fill_masks",
    "draft_runners_up",
)
"""Pointer fields of an entry."""
_LONGEST = 1 << 24


BoolArray = npt.NDArray[np.bool_]


def needs_history(entries: Any) -> BoolArray:
    """Which entries [n] have penalties or bad words, so that the next token depends on the tokens before it."""
    found: BoolArray = (entries["repetition_penalty"] != 1) | (entries["presence_penalty"] != 0)
    found |= (entries["frequency_penalty"] != 0) | (entries["num_bad_words"] > 0)
    return found


def has_edits(entries: Any, num_known: Int32Array) -> BoolArray:
    """Which entries [n] edit logits before temperature after num_known [n] tokens; masks of guides not counted."""
    found: BoolArray = (entries["num_end_ids"] > 0) & (num_known - entries["prompt_len"] < entries["min_tokens"])
    found |= needs_history(entries) | (entries["num_bias"] > 0)
    return found


class PackedSampling:
    """Entries of some slots with the tokens and lists they point to, as one int32 array.

    Built per call from the host's table, so that there is no second copy of a request's state to keep up to date. Of a
    request's tokens only the pending drafts are packed, unless its distribution needs the history. sources: by index of
    those with drafts that were not drawn, who proposed each of the pending ones.
    """

    def __init__(self, max_batch_size: int, vocab_size: int) -> None:
        self._num_mask_words = -(-vocab_size // 32)
        self._tokens: list[tuple[int, Int32Array]] = [(0, np.zeros(0, np.int32))] * max_batch_size
        self._sources: list[tuple[int, memoryview]] = [(0, memoryview(b""))] * max_batch_size
        self.entries: Any = np.zeros(0, SAMPLING_DTYPE)
        self.pieces: list[Int32Array] = []
        self.sources: dict[int, bytes] = {}

    def gather(
        self,
        sampling: npt.NDArray[np.void],
        slots: Int32Array,
        num_tokens: Int32Array,
        num_drafts: Int32Array,
        num_rows: Int32Array | None = None,
        branch_tokens: Sequence[int] = (),
    ) -> int:
        """Collect what the slots [n] need -> number of int32 values for place().

        num_rows [n]: for a test of num_drafts pending drafts: positions from num_tokens on whose masks are sent, and
        the drafts' sources with them; None: neither. branch_tokens: of the last so many entries, the token that stands
        in the place of the slot's own last one.
        """
        self.entries = sampling[slots]
        # end_ids matter only for min_tokens, and almost every request has some: without a minimum they are not sent.
        self.entries["num_end_ids"][self.entries["min_tokens"] <= 0] = 0
        self.pieces = []
        self.sources = {}
        self._offsets: list[tuple[int, str, int]] = []
        size: int = self.entries.size * _ENTRY_INTS
        has_history = needs_history(self.entries)
        has_lists = has_history | (self.entries["num_end_ids"] > 0) | (self.entries["num_bias"] > 0)
        first_branch = slots.size - len(branch_tokens)
        firsts = np.where(has_history, 0, num_tokens)
        columns = (slots, self.entries["tokens"], firsts, num_tokens, num_drafts, has_lists)
        for i, (slot, address, first, known, pending, listed) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            tokens = self._tokens_of(slot, address)
            if i >= first_branch and first < known:
                tokens = np.append(tokens[: known - 1], np.int32(branch_tokens[i - first_branch]))
            # Kernels index tokens by position, so the address is that of position 0, wherever the packed piece starts.
            size = self._add(i, "tokens", tokens[first : known + pending], size, -4 * first)
            if listed:
                size = self._add_lists(i, size)
        if num_rows is not None:
            size = self._add_sources(slots, num_tokens, num_drafts, size)
            for i in np.flatnonzero(self.entries["masks"]).tolist():
                size = self._add_masks(i, int(num_tokens[i]), int(num_rows[i]), size)
        return size

    def place(self, target: Int32Array, base: int, draft_probs: npt.NDArray[np.uint64] | None) -> None:
        """Write everything to target [size from gather()], which will be at `base` on the device, entries first.

        draft_probs [n]: device addresses of the slots' draft probabilities.
        """
        entries = self.entries
        for name in ADDRESSES:
            entries[name] = 0
        is_sampled = entries["mode"] == native.SAMPLED
        entries["draft_probs"] = 0 if draft_probs is None else np.where(is_sampled, draft_probs, 0)
        start = entries.size * _ENTRY_INTS
        for (i, name, shift), piece in zip(self._offsets, self.pieces, strict=True):
            target[start : start + piece.size] = piece
            entries[name][i] = base + 4 * start + shift
            start += piece.size
        target[: entries.size * _ENTRY_INTS] = entries.view(np.int32)

    def _add(self, i: int, name: str, piece: Int32Array, size: int, shift: int = 0) -> int:
        """shift: of the address in bytes."""
        self.pieces.append(piece)
        self._offsets.append((i, name, shift))
        return size + piece.size

    def _add_lists(self, i: int, size: int) -> int:
        entry = self.entries[i]
        for name, count, extra in _LISTS:
            if entry[count] > 0:
                size = self._add(i, name, int32_at(int(entry[name]), int(entry[count]) + extra), size)
        if entry["num_bad_words"] > 0:
            ends = int32_at(int(entry["cu_bad_words"]), int(entry["num_bad_words"]) + 1)
            size = self._add(i, "bad_words", int32_at(int(entry["bad_words"]), int(ends[-1])), size)
        return size

    def _add_sources(self, slots: Int32Array, num_tokens: Int32Array, num_drafts: Int32Array, size: int) -> int:
        """Of the requests with drafts that were not drawn; as with tokens the address is that of position 0."""
        if not self.entries["draft_sources"].any():
            return size
        columns = (slots, self.entries["draft_sources"], num_tokens, num_drafts)
        for i, (slot, address, known, pending) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            sources = bytes(self._sources_of(slot, address)[known : known + pending])
            if any(sources):  # quicker than numpy's, of a few
                self.sources[i] = sources
                piece = np.frombuffer(sources.ljust(-(-pending // 4) * 4, b"\0"), np.int32)
                size = self._add(i, "draft_sources", piece, size, -known)
        return size

    def _add_masks(self, i: int, position: int, num_rows: int, size: int) -> int:
        """The masks of num_rows positions, each where position % num_rows finds it."""
        entry = self.entries[i]
        num_kept = int(entry["num_mask_rows"])
        kept = int32_at(int(entry["masks"]), num_kept * self._num_mask_words).reshape(num_kept, -1)
        positions = position + (np.arange(num_rows) - position) % num_rows
        entry["num_mask_rows"] = num_rows
        return self._add(i, "masks", kept[positions % num_kept].reshape(-1), size)

    def _tokens_of(self, slot: int, address: int) -> Int32Array:
        """A view that starts at a slot's tokens; it extends beyond them, but only existing tokens are read."""
        kept, view = self._tokens[slot]
        if kept != address:
            view = int32_at(address, _LONGEST)
            self._tokens[slot] = address, view
        return view

    def _sources_of(self, slot: int, address: int) -> memoryview:
        """As _tokens_of, of a slot's sources; empty where all drafts are the draft model's."""
        kept, view = self._sources[slot]
        if kept != address:
            view = int8_at(address, _LONGEST).data
            self._sources[slot] = address, view
        return view
