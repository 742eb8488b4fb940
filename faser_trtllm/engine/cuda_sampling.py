"""The sampling table's entries as kernels read them: host memory that an entry points to, packed for one upload."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, int32_at

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
    "end_ids",
    "bias_ids",
    "bias_values",
    "bad_words",
    "cu_bad_words",
    "masks",
    "fill_masks",
)
"""Fields of an entry that point to memory."""
_LONGEST = 1 << 24


def needs_history(entry: np.void) -> bool:
    """Whether the law of the next token depends on which tokens came before, beyond what the model makes of them."""
    has_penalties = (
        entry["repetition_penalty"] != 1 or entry["presence_penalty"] != 0 or entry["frequency_penalty"] != 0
    )
    return bool(has_penalties or entry["num_bad_words"] > 0)


def has_edits(entry: np.void, num_known: int) -> bool:
    """Whether logits are edited before temperature, behind num_known tokens or later."""
    bans_ends = entry["num_end_ids"] > 0 and num_known - entry["prompt_len"] < entry["min_tokens"]
    return bool(needs_history(entry) or entry["num_bias"] > 0 or bans_ends)


class PackedSampling:
    """Entries of some slots with the tokens and lists they point to, as one run of int32.

    Made per call from the host's table, so that there is no second copy of a request's state to keep up to date. Of a
    request's tokens only the pending drafts are packed, unless its law needs the history.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._tokens: list[tuple[int, Int32Array]] = [(0, np.zeros(0, np.int32))] * max_batch_size
        self.entries: Any = np.zeros(0, SAMPLING_DTYPE)
        self.pieces: list[Int32Array] = []

    def gather(
        self, sampling: npt.NDArray[np.void], slots: Int32Array, num_tokens: Int32Array, num_drafts: Int32Array
    ) -> int:
        """Collect what the slots [n] need -> int32 numbers that place() takes."""
        self.entries = sampling[slots]
        # Ends are only banned, and almost every request has some: without a minimum there is nothing to send.
        self.entries["num_end_ids"][self.entries["min_tokens"] <= 0] = 0
        self.pieces = []
        self._offsets: list[tuple[int, str, int]] = []
        size: int = self.entries.size * _ENTRY_INTS
        is_plain = ~_may_have_lists(self.entries)
        counts = zip(slots.tolist(), num_tokens.tolist(), num_drafts.tolist(), is_plain.tolist(), strict=True)
        for i, (slot, known, pending, plain) in enumerate(counts):
            tokens = self._tokens_of(slot, int(self.entries["tokens"][i]))
            first = known if plain or not needs_history(self.entries[i]) else 0
            # Kernels index tokens by position, so the address is that of position 0, wherever the piece begins.
            size = self._add(i, "tokens", tokens[first : known + pending], size, -first)
            if not plain:
                size = self._add_lists(i, size)
        return size

    def place(self, target: Int32Array, base: int, laws: npt.NDArray[np.uint64] | None) -> None:
        """Write it all to target [gather()'s number], which will be at `base` on the device, entries first.

        laws [n]: addresses of the slots' draft laws there.
        """
        entries = self.entries
        for name in ADDRESSES:
            entries[name] = 0
        entries["draft_probs"] = 0 if laws is None else np.where(entries["mode"] == native.SAMPLED, laws, 0)
        start = entries.size * _ENTRY_INTS
        for (i, name, shift), piece in zip(self._offsets, self.pieces, strict=True):
            target[start : start + piece.size] = piece
            entries[name][i] = base + 4 * (start + shift)
            start += piece.size
        target[: entries.size * _ENTRY_INTS] = entries.view(np.int32)

    def _add(self, i: int, name: str, piece: Int32Array, size: int, shift: int = 0) -> int:
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

    def _tokens_of(self, slot: int, address: int) -> Int32Array:
        """A view that begins at a slot's tokens; it reaches beyond them, and only what exists is read."""
        kept, view = self._tokens[slot]
        if kept != address:
            view = int32_at(address, _LONGEST)
            self._tokens[slot] = address, view
        return view


def _may_have_lists(entries: Any) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (entries["num_end_ids"] > 0) | (entries["num_bias"] > 0)
    found |= (entries["num_bad_words"] > 0) | (entries["repetition_penalty"] != 1)
    found |= (entries["presence_penalty"] != 0) | (entries["frequency_penalty"] != 0)
    return found
