"""References of ops/requests/check_drafts.py."""

from __future__ import annotations

from faser_trtllm.ops.arrays import Int32Array, SamplingArray, int32_at


def check_drafts_reference(
    sampling: SamplingArray,
    slots: Int32Array,
    first: Int32Array,
    num_new: Int32Array,
    room: Int32Array,
    vocab_size: int,
) -> int | None:
    """Compute check_drafts() in a plain loop."""
    columns = (column.tolist() for column in (slots, first, num_new, room))
    for index, (slot, begin, count, limit) in enumerate(zip(*columns, strict=True)):
        if count == 0:  # valid even if room is negative
            continue
        if not 0 < count <= limit:
            return index
        tokens = int32_at(int(sampling[slot]["tokens"]), begin + count)[begin:].tolist()
        if not all(0 <= token < vocab_size for token in tokens):
            return index
    return None
