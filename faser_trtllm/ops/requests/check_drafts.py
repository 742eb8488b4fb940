"""Check the counts and tokens that a drafter returns, natively, since the counts index memory."""

from __future__ import annotations

from faser_trtllm import native
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, int32_addresses, sampling_address


def check_drafts(
    sampling: SamplingArray,
    slots: Int32Array,
    first: Int32Array,
    num_new: Int32Array,
    room: Int32Array,
    vocab_size: int,
) -> int | None:
    """Return the index of the first request with invalid drafts: its num_new[i], at positions from first[i] on, are
    negative or above room[i], or a token is outside the vocabulary. None: all are valid."""
    at_slots, *columns = int32_addresses(slots, first, num_new, room)
    found: int = native.library().faser_check_drafts(
        slots.size, at_slots, sampling_address(sampling), *columns, vocab_size
    )
    return found if found < slots.size else None
