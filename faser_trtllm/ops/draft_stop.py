"""When drafting stops early: the reference of plugins/cpu/draft.cpp, for engines that draft in Python and for tests.

The rule is core/decision.py DraftStop: continue only while the next step pays. Sums and products are in float64 and in
the native library's order, so that both decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.ops.arrays import Float32Array, Float64Array, Int8Array, Int32Array, float32_at, int8_at


def acceptance(stop: DraftStop, mode: int, place: int, margin: float) -> float:
    """Estimated probability that a draft at this place (0: the first pending one) with this margin is accepted."""
    return sigmoid(float(stop.slope[mode, place]) * float(margin) + float(stop.intercept[mode, place]))


def sigmoid(z: float) -> float:
    if z >= 0:
        return 1.0 / (1.0 + math.exp(-z))
    e = math.exp(z)
    return e / (1.0 + e)


def survival(stop: DraftStop, mode: int, margins: Float32Array, sources: Int8Array | None = None) -> float:
    """Estimated probability that all drafts with these margins [num_pending], in order, are accepted.

    sources [num_pending]: who proposed them; None or empty: the draft model, all of them. The margin of any other's
    draft is its log-odds of acceptance.
    """
    product = 1.0
    for place, margin in enumerate(margins.tolist()):
        is_certain = sources is not None and sources.size and sources[place] != native.BY_MODEL
        product *= sigmoid(margin) if is_certain else acceptance(stop, mode, place, margin)
    return product


def next_worth(
    stop: DraftStop, modes: int | Int32Array, places: int | Int32Array, reached: float | Float64Array
) -> Float64Array:
    """Tokens that drafts at these places are expected to bring beyond their rows' prices; negative where no row pays.

    reached: the survival of the drafts before them. Arrays of one shape, or numbers.
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
    """After a draft step: which requests continue drafting.

    modes[a]: SamplingMode of request a. margins[a] [num_pending] fp32: of all its pending drafts, including the newest;
    sources[a]: of these, as survival has them. All cover the requests that have just drafted a token and want another,
    in batch order.
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
    """A view of the margins [num_pending] of a slot's pending drafts; entry: its element of a sampling table."""
    return float32_at(int(entry["draft_margins"]) + 4 * num_tokens, num_pending)


def pending_sources(entry: np.void, num_tokens: int, num_pending: int) -> Int8Array:
    """As pending_margins, of who proposed them; empty where all are the draft model's."""
    address = int(entry["draft_sources"])
    return int8_at(address + num_tokens if address else 0, num_pending)
