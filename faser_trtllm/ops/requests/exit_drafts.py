"""Read the pending drafts' candidates, and the drafts' places among them, for a segment boundary."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, int32_addresses, int32_at, sampling_address


def exit_drafts(
    sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array, num_drafts: Int32Array
) -> tuple[Int32Array, Int32Array]:
    """Read the first num_drafts[i] drafts after num_tokens[i] tokens, of all requests in turn.

    Returns candidates [sum of num_drafts, NUM_CANDIDATES] and places [sum of num_drafts], 0 for a draft that is not
    among them. Raises InvalidArgumentError for a slot with drafts but no candidates.
    """
    at_slots, *columns = int32_addresses(slots, num_tokens, num_drafts)
    total = int(num_drafts.sum())
    candidates, places = np.zeros((total, NUM_CANDIDATES), np.int32), np.zeros(total, np.int32)
    status = native.library().faser_exit_drafts(
        slots.size, at_slots, sampling_address(sampling), *columns, *int32_addresses(candidates, places)
    )
    native.check(status, f"reading the candidates of {slots.size} requests")
    return candidates, places


def exit_drafts_reference(
    sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array, num_drafts: Int32Array
) -> tuple[Int32Array, Int32Array]:
    """exit_drafts in plain loops."""
    candidates: list[list[int]] = []
    places: list[int] = []
    for slot, first, count in zip(*(c.tolist() for c in (slots, num_tokens, num_drafts)), strict=True):
        if not count:
            continue
        entry, end = sampling[slot], first + count
        tokens = int32_at(int(entry["tokens"]), end).tolist()
        known = int32_at(int(entry["draft_candidates"]), end * NUM_CANDIDATES).reshape(-1, NUM_CANDIDATES).tolist()
        for token, best in zip(tokens[first:], known[first:], strict=True):
            candidates.append(best)
            places.append(best.index(token) if token in best else 0)
    return np.array(candidates, np.int32).reshape(-1, NUM_CANDIDATES), np.array(places, np.int32)
