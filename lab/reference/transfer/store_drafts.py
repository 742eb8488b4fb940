"""References of ops/transfer/store_drafts.py."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import (
    Float32Array,
    Int32Array,
    SamplingArray,
    float32_at,
    int8_at,
    int32_at,
)


def store_drafts_reference(
    sampling: SamplingArray,
    slots: Int32Array,
    num_known: Int32Array,
    tokens: Int32Array,
    margins: Float32Array,
    candidates: Int32Array,
    runners_up: Int32Array | None,
) -> Int32Array:
    """Do what DraftStore.store() does, in plain loops."""
    counts = np.zeros(slots.size, np.int32)
    for i, (slot, start) in enumerate(zip(slots.tolist(), num_known.tolist(), strict=True)):
        entry = sampling[slot]
        n = int(np.cumprod(tokens[:, i] >= 0).sum())
        memories = (
            (int32_at, "tokens", tokens[:n, i]),
            (float32_at, "draft_margins", margins[:n, i]),
            (int8_at, "draft_sources", native.BY_MODEL),
            (int32_at, "draft_runners_up", -1 if runners_up is None else runners_up[:n, i]),
        )
        for view, name, values in memories:
            if entry[name]:
                view(int(entry[name]), start + n)[start:] = values
        if entry["draft_candidates"]:
            kept = int32_at(int(entry["draft_candidates"]), (start + n) * NUM_CANDIDATES).reshape(-1, NUM_CANDIDATES)
            kept[start:] = candidates[:n, i]
        if entry["mode"] == native.SAMPLED:
            entry["draft_counter"] += np.uint64(n)
        counts[i] = n
    return counts
