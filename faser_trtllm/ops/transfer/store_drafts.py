"""Write drafts that a device made to the memory of their requests."""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.ops.arrays import (
    Float32Array,
    Int32Array,
    SamplingArray,
    address_of,
    sampling_address,
)


class DraftStore:
    """Stores drafts of the draft model; its result is valid until the next call."""

    def __init__(self, max_batch_size: int) -> None:
        self._num_new = np.zeros(max_batch_size, np.int32)
        self._num_new_address = address_of(self._num_new, np.int32)

    def store(
        self,
        sampling: SamplingArray,
        slots: Int32Array,
        num_known: Int32Array,
        tokens: Int32Array,
        margins: Float32Array,
        candidates: Int32Array,
        runners_up: Int32Array | None,
    ) -> Int32Array:
        """Store the drafts of the requests in slots [n] after num_known [n] tokens; return the number of drafts [n].

        tokens, margins, runners_up [num_steps, at least n], candidates [num_steps, at least n, NUM_CANDIDATES]: the
        first n columns are stored, up to the first token -1. runners_up None: there are none. Advances draft_counter.
        """
        num_steps, stride = tokens.shape
        if margins.shape != tokens.shape or candidates.shape != (num_steps, stride, NUM_CANDIDATES):
            raise ValueError(f"margins {margins.shape} and candidates {candidates.shape} are not of {tokens.shape}")
        status = native.library().faser_store_drafts(
            slots.size,
            native.address_of_buffer(slots),
            sampling_address(sampling),
            native.address_of_buffer(num_known),
            num_steps,
            stride,
            address_of(tokens, np.int32),
            address_of(margins, np.float32),
            address_of(candidates, np.int32),
            None if runners_up is None else address_of(runners_up, np.int32),
            self._num_new_address,
        )
        native.check(status, f"storing the drafts of {slots.size} requests")
        return self._num_new[: slots.size]
