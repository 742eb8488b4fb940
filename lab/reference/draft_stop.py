"""References of plugins/cpu/draft.cpp: continue drafting only while the next step pays.

Sums and products are in float64 and in the native library's order, so that both make the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.ops.arrays import (
    Float32Array,
    Float64Array,
    Int8Array,
    Int32Array,
    float32_at,
    int8_at,
)
from faser_trtllm.ops.draft_stop import sigmoid


def acceptance(stop: DraftStop, mode: int, place: int, margin: float) -> float:
    """Return the estimated probability that a draft at this place (0: the first) with this margin is accepted."""
    return sigmoid(float(stop.slope[mode, place]) * float(margin) + float(stop.intercept[mode, place]))


def survival(stop: DraftStop, mode: int, margins: Float32Array, sources: Int8Array | None = None) -> float:
    """Return the estimated probability that all drafts with these margins [num_pending], in order, are accepted.

    sources [num_pending]: the drafts' sources; None or empty: all are the draft model's. The margin of a draft from any
    other source is its log-odds of acceptance.
    """
    product = 1.0
    for place, margin in enumerate(margins.tolist()):
        is_certain = sources is not None and sources.size and sources[place] != native.BY_MODEL
        product *= sigmoid(margin) if is_certain else acceptance(stop, mode, place, margin)
    return product


def next_worth(
    stop: DraftStop, modes: int | Int32Array, places: int | Int32Array, reached: float | Float64Array
) -> Float64Array:
    """Return the tokens that drafts at these places should bring beyond their rows' prices; negative if none pays.

    reached: the survival of the drafts before them. The arguments are arrays of one shape, or numbers.
    """
    prior, spread = (table[modes, places].astype(np.float64) for table in (stop.prior, stop.spread))
    row_price = stop.row_price[places].astype(np.float64)
    high, low = (np.asarray(reached) * probability - row_price for probability in (prior + spread, prior - spread))
    return np.asarray(np.where(high < 0.0, high, 0.5 * (high + np.maximum(low, 0.0))))


def goes_on(
    stop: DraftStop,
    modes: Sequence[int],
    margins: Sequence[Float32Array],
    sources: Sequence[Int8Array | None] | None = None,
) -> list[bool]:
    """Return which requests continue drafting after a draft step.

    modes[a]: SamplingMode of request a. margins[a] [num_pending] fp32: of all its pending drafts, with the newest;
    sources[a]: see survival. They list the requests that have just drafted a token and want another, in batch order.
    """
    worths = []
    for mode, pending, by in zip(modes, margins, sources or (None,) * len(margins), strict=True):
        place = len(pending)
        reached = survival(stop, mode, pending, by)
        worths.append(float(next_worth(stop, mode, place, reached)))
    going = [worth >= 0.0 for worth in worths]
    gain = 0.0
    for worth in worths:
        if worth >= 0.0:
            gain += worth
    if gain < float(stop.step_price[sum(going)]):
        return [False] * len(going)
    return going


def pending_margins(entry: np.void, num_tokens: int, num_pending: int) -> Float32Array:
    """Return a view of the margins [num_pending] of a slot's pending drafts; entry: its element of a sampling table."""
    return float32_at(int(entry["draft_margins"]) + 4 * num_tokens, num_pending)


def pending_sources(entry: np.void, num_tokens: int, num_pending: int) -> Int8Array:
    """Return the same as pending_margins for the drafts' sources; empty if all are the draft model's."""
    address = int(entry["draft_sources"])
    return int8_at(address + num_tokens if address else 0, num_pending)
