"""Pack the sampling entries of a batch, and the arrays that they point to, into one block for an engine's own memory.

Every call packs them from the host's table, so that a request's state has no second copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.ops.arrays import (
    SAMPLING_DTYPE,
    Int32Array,
    SamplingArray,
    address_of,
    sampling_address,
)

ENTRY_INTS = SAMPLING_DTYPE.itemsize // 4

BoolArray = npt.NDArray[np.bool_]


class Packed(NamedTuple):
    """The result of packing."""

    size: int  # of the block, in int32 values
    is_edited: bool  # some request edits its logits after its known tokens


class DraftProbsAddress(NamedTuple):
    """The device memory that holds the distributions of unseeded drafts."""

    address: int  # of slot 0
    slot_bytes: int  # from one slot to the next


def needs_history(entries: Any) -> BoolArray:
    """Return which entries [n] have penalties or bad words, so that the next token depends on the tokens before it."""
    found: BoolArray = (entries["repetition_penalty"] != 1) | (entries["presence_penalty"] != 0)
    found |= (entries["frequency_penalty"] != 0) | (entries["num_bad_words"] > 0)
    return found


def has_edits(entries: Any, num_known: Int32Array) -> BoolArray:
    """Return which entries [n] edit logits before temperature after num_known [n] tokens, apart from guides' masks."""
    found: BoolArray = (entries["num_end_ids"] > 0) & (num_known - entries["prompt_len"] < entries["min_tokens"])
    found |= needs_history(entries) | (entries["num_bias"] > 0)
    return found


class SamplingPacker:
    """Packs the entries of a batch's slots.

    Only a request's pending drafts are packed, unless its distribution needs the history. Kernels index tokens and
    sources by position, so their addresses are those of position 0, wherever the packed part starts.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._is_edited = np.zeros(1, np.int32)
        self._is_edited_view = self._is_edited.data
        self._is_edited_address = address_of(self._is_edited, np.int32)

    def pack(
        self,
        sampling: SamplingArray,
        slots: Int32Array,
        num_tokens: Int32Array,
        num_drafts: Int32Array,
        out: Int32Array,
        base: int,
        *,
        num_rows: Int32Array | None = None,
        branch_tokens: Sequence[int] = (),
        draft_probs: DraftProbsAddress | None = None,
    ) -> Packed:
        """Write the entries [n] and then the arrays they point to; `out` will be at `base` on the device.

        num_drafts: drafts pending after num_tokens tokens. num_rows: rows that rejection sampling verifies; packs masks
        and sources too, and empty entries for 0 rows; None: packs for drafting. branch_tokens: tokens of the last
        entries, in place of their slots' last ones. The block is incomplete if its size exceeds out's. Raises
        InvalidArgumentError for a slot without tokens or a guided request without masks.
        """
        branches = np.array(branch_tokens, np.int32) if branch_tokens else None
        at_probs, slot_bytes = draft_probs or (0, 0)
        size = native.library().faser_pack_sampling(
            slots.size,
            native.address_of_buffer(slots),
            sampling_address(sampling),
            native.address_of_buffer(num_tokens),
            native.address_of_buffer(num_drafts),
            None if num_rows is None else native.address_of_buffer(num_rows),
            None if branches is None else native.address_of_buffer(branches),
            len(branch_tokens),
            self._vocab_size,
            base,
            at_probs,
            slot_bytes,
            native.address_of_buffer(out),
            out.size,
            self._is_edited_address,
        )
        if size < 0:
            native.check(size, f"packing the sampling parameters of {slots.size} requests")
        return Packed(size, bool(self._is_edited_view[0]))
