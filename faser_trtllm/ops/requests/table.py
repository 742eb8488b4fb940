"""The counts of requests, one row per slot, so that a step reads and writes those of all requests at once."""

from __future__ import annotations

import numpy as np

from faser_trtllm.core.counts import NUM_COUNTS
from faser_trtllm.core.request import Request, new_counts
from faser_trtllm.native.structures import FaserTexts
from faser_trtllm.ops.arrays import Float64Array, Int32Array, SamplingArray, address_of

TEXTS_DTYPE = np.dtype(FaserTexts)


class RequestTable:
    """The counts, times and text addresses of all slots, in arrays that never move."""

    def __init__(self, max_batch_size: int) -> None:
        self.counts: Int32Array = np.zeros((max_batch_size, NUM_COUNTS), np.int32)  # columns: see core/request.py
        self.times_s: Float64Array = np.zeros((max_batch_size, 2))  # see Request.times_s
        # Addresses of the tokens, the end ids and, with a prediction, the draft sources; 0 in an empty slot.
        self.texts: SamplingArray = np.zeros(max_batch_size, TEXTS_DTYPE)
        self._end_ids: list[Int32Array | None] = [None] * max_batch_size  # keep alive for their addresses

    def enter(self, slot: int, request: Request) -> None:
        """Move the request's counts to the slot's row; its token array must not be replaced until it leaves."""
        request.slot = slot
        request.keep_counts_in(self.counts[slot].data, self.times_s[slot].data)
        end_ids = self._end_ids[slot] = np.array(request.params.end_ids, np.int32)
        text = self.texts[slot]
        text["tokens"] = address_of(request.tokens, np.int32)
        text["end_ids"], text["num_end_ids"] = address_of(end_ids, np.int32), end_ids.size
        text["draft_sources"] = address_of(request.draft_sources, np.int8) if len(request.params.prediction) else 0

    def leave(self, request: Request) -> None:
        """Move the request's counts out of the table again."""
        slot, request.slot = request.slot, -1
        request.keep_counts_in(*new_counts())
        self.texts[slot] = np.zeros((), TEXTS_DTYPE)
        self._end_ids[slot] = None
