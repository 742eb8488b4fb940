"""A plan for several steps in which all requests decode and none waits."""

from __future__ import annotations

import numpy as np

from faser_trtllm.core.counts import MAX_DRAFT_LEN, NUM_DRAFTS, NUM_TOKENS, Int32Array
from faser_trtllm.core.decision import Decision, StepView
from faser_trtllm.core.plan import ScheduledRequests
from faser_trtllm.core.request import counts_of


class HeldPlan:
    """Holds what is the same in all steps of a plan. slots: [num_requests] int32."""

    def __init__(self, view: StepView, decision: Decision) -> None:
        self.view, self.decision = view, decision
        requests, n = view.decoding, len(view.decoding)
        self.slots = np.array([request.slot for request in requests], np.int32)
        self.is_drafting = any(decision.lengths)
        self._ones, self._parts = np.ones(n, np.int32), (n, n, n)
        counts = counts_of(requests)
        self._wanted = np.minimum(np.array(decision.lengths, np.int32), counts[:, MAX_DRAFT_LEN])
        self._last = np.array([request.last_to_draft for request in requests], np.int32)
        self._of_model: Int32Array | None = None
        if decision.model_lengths is not None:
            self._of_model = np.array([decision.model_lengths.get(request.slot, 0) for request in requests], np.int32)

    def schedule(self, counts: Int32Array, num_rows: int) -> ScheduledRequests:
        """Schedule a step. counts: [num_requests, NUM_COUNTS], current. Of the num_rows rows for drafts, requests take
        theirs in order; pending drafts without a row stay pending."""
        pending = counts[:, NUM_DRAFTS].copy()
        num_drafts = shares = pending
        if self.is_drafting or any(pending.tolist()):
            shares = np.maximum(pending, np.minimum(self._wanted, self._last - counts[:, NUM_TOKENS]))
            num_drafts = shares
            if sum(shares.tolist()) > num_rows:
                shares = np.clip(num_rows - (np.cumsum(shares) - shares), 0, shares).astype(np.int32)
                num_drafts = np.maximum(shares, pending)
        of_model = None if self._of_model is None else np.minimum(num_drafts, self._of_model)
        columns = (self._ones, num_drafts, shares)
        return ScheduledRequests(self.view.decoding, self.slots, counts, *columns, self._parts, of_model)
