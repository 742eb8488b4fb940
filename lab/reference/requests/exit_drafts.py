"""References of ops/requests/exit_drafts.py."""

from __future__ import annotations

import numpy as np

from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import Int32Array, SamplingArray, int32_at


def exit_drafts_reference(
    sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array, num_drafts: Int32Array
) -> tuple[Int32Array, Int32Array]:
    """Compute exit_drafts() in plain loops."""
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
