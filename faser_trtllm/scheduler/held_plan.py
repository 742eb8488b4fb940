"""A plan for steps where all requests decode and none waits, with what is the same in all of them."""

from __future__ import annotations

import numpy as np

from faser_trtllm.core.counts import MAX_DRAFT_LEN, MAX_NUM_TOKENS, NUM_DRAFTS, NUM_TOKENS
from faser_trtllm.core.decision import Decision, StepView
from faser_trtllm.core.request import counts_of
from faser_trtllm.ops.arrays import Int32Array


class HeldPlan:
    """slots [num_requests] int32; ones: new tokens of each request."""

    def __init__(self, view: StepView, decision: Decision) -> None:
        self.view, self.decision = view, decision
        self.slots = np.array([request.slot for request in view.decoding], np.int32)
        self.ones = [1] * len(view.decoding)
        self.is_drafting = any(decision.lengths)
        counts = counts_of(view.decoding)
        self._wanted = np.minimum(np.array(decision.lengths, np.int32), counts[:, MAX_DRAFT_LEN])
        self._last = counts[:, MAX_NUM_TOKENS] - 1  # tokens with which no draft is useful

    def shares(self, counts: Int32Array, num_rows: int) -> tuple[Int32Array, Int32Array]:
        """Drafts pending after drafting, and rows for drafts out of num_rows, first come first served. counts
        [num_requests, NUM_COUNTS]: of now."""
        pending = counts[:, NUM_DRAFTS]
        if not self.is_drafting and not pending.any():
            return pending, pending
        wanted = np.maximum(pending, np.minimum(self._wanted, self._last - counts[:, NUM_TOKENS]))
        if wanted.sum() <= num_rows:
            return wanted, wanted
        shares = np.clip(num_rows - (np.cumsum(wanted) - wanted), 0, wanted).astype(np.int32)
        return np.maximum(shares, pending), shares
