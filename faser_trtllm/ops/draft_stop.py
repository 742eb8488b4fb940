"""Early stopping of drafting: the rule DraftStop (core/decision.py) as the native library reads it."""

from __future__ import annotations

import ctypes
import math

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.native.structures import FaserDraftStop
from faser_trtllm.ops.arrays import (
    Float64Array,
    Int32Array,
    SamplingArray,
    sampling_address,
)


class NativeStop:
    """A DraftStop as struct faser_draft_stop. Keeps the arrays of the last rule alive."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._stop: DraftStop | None = None
        self._struct = FaserDraftStop()

    def address(self, stop: DraftStop, max_draft_len: int) -> int:
        """Return the structure's address, valid until the next call; ValueError unless arrays fit and are float32."""
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
    """Write to out fp64 [n] the survival of each slot's num_drafts [n] pending drafts after num_tokens [n] tokens.

    stop_address: from NativeStop.address(). Raises InvalidArgumentError for a slot with drafts but no margins.
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


def sigmoid(z: float) -> float:
    if z >= 0:
        return 1.0 / (1.0 + math.exp(-z))
    e = math.exp(z)
    return e / (1.0 + e)
