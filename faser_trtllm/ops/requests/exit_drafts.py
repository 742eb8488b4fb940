"""What a segment boundary asks about pending drafts: the draft model's candidates, and where the drafts are among
them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, address_of, int32_at, sampling_address


def exit_drafts(
    sampling: SamplingArray, slots: Sequence[int], num_tokens: Sequence[int], num_drafts: Sequence[int]
) -> tuple[Int32Array, Int32Array]:
    """Of the first num_drafts[i] drafts behind num_tokens[i] tokens, of all requests in turn: candidates [num_drafts in
    all, NUM_CANDIDATES] and places [num_drafts in all], 0 for a draft that is not there. InvalidArgumentError for a
    slot with drafts but no candidates."""
    columns = array("i", slots), array("i", num_tokens), array("i", num_drafts)
    at_slots, *at_counts = [column.buffer_info()[0] for column in columns]
    total = sum(num_drafts)
    candidates, places = np.zeros((total, NUM_CANDIDATES), np.int32), np.zeros(total, np.int32)
    status = native.library().faser_exit_drafts(
        len(slots),
        at_slots,
        sampling_address(sampling),
        *at_counts,
        address_of(candidates, np.int32),
        address_of(places, np.int32),
    )
    native.check(status, f"reading the candidates of {len(slots)} requests")
    return candidates, places


def exit_drafts_reference(
    sampling: SamplingArray, slots: Sequence[int], num_tokens: Sequence[int], num_drafts: Sequence[int]
) -> tuple[Int32Array, Int32Array]:
    """exit_drafts in plain loops."""
    candidates: list[list[int]] = []
    places: list[int] = []
    for slot, first, count in zip(slots, num_tokens, num_drafts, strict=True):
        if not count:
            continue
        entry, end = sampling[slot], first + count
        tokens = int32_at(int(entry["tokens"]), end).tolist()
        known = int32_at(int(entry["draft_candidates"]), end * NUM_CANDIDATES).reshape(-1, NUM_CANDIDATES).tolist()
        for token, best in zip(tokens[first:], known[first:], strict=True):
            candidates.append(best)
            places.append(best.index(token) if token in best else 0)
    return np.array(candidates, np.int32).reshape(-1, NUM_CANDIDATES), np.array(places, np.int32)
