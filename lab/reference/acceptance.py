"""References of ops/acceptance.py."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.ops.acceptance import MAX_LOG_ODDS, MAX_MARGIN, AcceptanceModel
from faser_trtllm.ops.arrays import (
    Float32Array,
    Int32Array,
    SamplingArray,
    float32_at,
    int8_at,
)


def is_certain(entry: np.void, position: int) -> bool:
    """Return whether the draft at this position comes from a drafter that draws nothing; its margin is then the
    log-odds that it is accepted."""
    sources = int8_at(int(entry["draft_sources"]), position + 1)
    return bool(sources.size and sources[position] != native.BY_MODEL)


def pending_margins(sampling: SamplingArray, slot: int, num_tokens: int, num_pending: int) -> list[float]:
    """Return the margins of the slot's first num_pending drafts, at most MAX_MARGIN each."""
    margins = float32_at(int(sampling[slot]["draft_margins"]) + 4 * num_tokens, num_pending).tolist()
    return [min(margin, MAX_MARGIN) for margin in margins]


def log_odds_reference(
    model: AcceptanceModel, sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array, num_drafts: Int32Array
) -> Float32Array:
    """Compute AcceptanceModel.log_odds() in plain loops."""
    odds: list[float] = []
    for slot, first, count in zip(*(c.tolist() for c in (slots, num_tokens, num_drafts)), strict=True):
        mode = int(sampling[slot]["mode"])
        margins = float32_at(int(sampling[slot]["draft_margins"]), first + count)[first:].tolist()
        for place, margin in enumerate(margins):
            own = float(model.slope[mode, place]) * min(margin, MAX_MARGIN) + float(model.intercept[mode, place])
            own = margin if is_certain(sampling[slot], first + place) else own
            odds.append(min(max(own, -MAX_LOG_ODDS), MAX_LOG_ODDS))
    return np.array(odds, np.float32)
