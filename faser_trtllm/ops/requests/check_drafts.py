"""Whether what a drafter says it wrote can be: checked natively, since the counts index memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from faser_trtllm import native
from faser_trtllm.ops.arrays import SamplingArray, int32_at, sampling_address


def check_drafts(
    sampling: SamplingArray,
    slots: Sequence[int],
    first: Sequence[int],
    num_new: Sequence[int],
    room: Sequence[int],
    vocab_size: int,
) -> int | None:
    """The first request whose num_new[i] drafts, at the positions from first[i] on, are more than room[i] or fewer than
    none, or have tokens outside the vocabulary; None: all can be."""
    columns = [array("i", column) for column in (slots, first, num_new, room)]
    at_slots, *others = [column.buffer_info()[0] for column in columns]
    found: int = native.library().faser_check_drafts(
        len(slots), at_slots, sampling_address(sampling), *others, vocab_size
    )
    return found if found < len(slots) else None


def check_drafts_reference(
    sampling: SamplingArray,
    slots: Sequence[int],
    first: Sequence[int],
    num_new: Sequence[int],
    room: Sequence[int],
    vocab_size: int,
) -> int | None:
    """check_drafts in a plain loop."""
    for index, (slot, begin, count, limit) in enumerate(zip(slots, first, num_new, room, strict=True)):
        if count == 0:  # also where more is pending than a step may keep
            continue
        if not 0 < count <= limit:
            return index
        tokens = int32_at(int(sampling[slot]["tokens"]), begin + count)[begin:].tolist()
        if not all(0 <= token < vocab_size for token in tokens):
            return index
    return None
