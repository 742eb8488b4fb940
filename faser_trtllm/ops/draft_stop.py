"""Early stopping of drafting: the reference of plugins/cpu/draft.cpp, and the rule in the native library's form.

The rule is core/decision.py DraftStop: continue only while the next step pays. Sums and products are in float64 and in
the native library's order, so that both make the same decisions.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.ops.arrays import (
    Float32Array,
    Float64Array,
    Int8Array,
    Int32Array,
    SamplingArray,
    float32_at,
    int8_at,
    sampling_address,
)


class NativeStop:
    """A rule as struct faser_draft_stop; keeps the arrays of the last rule alive."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._stop: DraftStop | None = None
        self._struct = native.FaserDraftStop()

    def address(self, stop: DraftStop, max_draft_len: int) -> int:
        """Return the structure's address, valid until the next call; ValueError for arrays too small or not float32."""
        struct = self._struct
        if stop is not self._stop:
            shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
                ("slope", "intercept", "prior", "spread"), (NUM_MODES, max_draft_len)
            )
            shapes |= {"row_price": (max_draft_len,), "step_price": (self._max_batch_size + 1,)}
            for name, shape in shapes.items():
                array = getattr(stop, name)
                fits = array.ndim == len(shape) and all(has >= n for has, n in zip(array.shape, shape, strict=True))
                if array.dtype != np.float32 or not fits or not array.flags.c_contiguous:
                    raise ValueError(
                        f"{name} is {array.dtype} {list(array.shape)}, need contiguous float32 {list(shape)}"
                    )
                setattr(struct, name, native.address_of_buffer(array))
            struct.stride = stop.slope.shape[1]
            if not struct.stride == stop.intercept.shape[1] == stop.prior.shape[1] == stop.spread.shape[1]:
                raise ValueError("slope, intercept, prior and spread are for different draft lengths")
            self._stop = stop
        return ctypes.addressof(struct)


def pending_survival(
    stop_address: int,
    sampling: SamplingArray,
    slots: Int32Array,
    num_tokens: Int32Array,
    num_drafts: Int32Array,
    out: Float64Array,
) -> None:
    """Write survival() of the drafts pending in slots [n], num_drafts [n] after num_tokens [n], to out [n].

    stop_address: that of a NativeStop. Raises InvalidArgumentError for a slot with drafts but no margins.
    """
    status = native.library().faser_pending_survival(
        stop_address,
        slots.size,
        native.address_of_buffer(slots),
        sampling_address(sampling),
        native.address_of_buffer(num_tokens),
        native.address_of_buffer(num_drafts),
        native.address_of_buffer(out),
    )
    native.check(status, f"reading the pending drafts of {slots.size} requests")


def acceptance(stop: DraftStop, mode: int, place: int, margin: float) -> float:
    """Return the estimated probability that a draft at this place (0: the first) with this margin is accepted."""
    return sigmoid(float(stop.slope[mode, place]) * float(margin) + float(stop.intercept[mode, place]))


def sigmoid(z: float) -> float:
    if z >= 0:
        return 1.0 / (1.0 + math.exp(-z))
    e = math.exp(z)
    return e / (1.0 + e)


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
