"""Choose branches: where a draft may be rejected, the draft model's runner-up, which the target may choose instead, can
be worth a row.

A chain of drafts with branches is a token tree. It needs no verification rule of its own: if the chain's verification
ends with a branch's token, that token is committed, and the branch's row is the row after it, run early.
"""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.ops.acceptance import AcceptanceModel
from faser_trtllm.ops.arrays import (
    Int32Array,
    SamplingArray,
    address_of,
    int32_addresses,
    sampling_address,
)

PRIOR = ((1.7, -0.6), (1.3, -0.7), (0.7, -0.1))  # slope and intercept by sampling mode, if none are fitted


def prior_acceptance(max_draft_len: int) -> AcceptanceModel:
    """Return a model for policies that learn nothing, between the fits of the demo's draft model and EAGLE-3 head."""
    model = AcceptanceModel(max_draft_len)
    for mode in range(NUM_MODES):
        model.slope[mode], model.intercept[mode] = PRIOR[mode]
    return model


class BranchPicker:
    """Picks branches into buffers that are allocated once."""

    def __init__(self, max_branches: int, max_num: int) -> None:
        """max_branches: per request. max_num: per batch."""
        self._max_branches, self._max_num = max_branches, max_num
        self._found = np.zeros((3, max(1, max_num)), np.int32)
        self._addresses = [address_of(row, np.int32) for row in self._found]

    def pick(
        self,
        sampling: SamplingArray,
        slots: Int32Array,
        num_tokens: Int32Array,
        num_pending: Int32Array,
        num_verified: Int32Array,
        acceptance: AcceptanceModel,
        min_worth: float | None,
        room: int,
    ) -> Int32Array:
        """Return the most valuable branches, at most `room`, in the order of requests and places: int32 [3,
        num_branches] of the request's index, the place of the draft that the token might replace (0: the first pending
        one), and the token.

        num_tokens, num_pending, num_verified [num_requests] int32: committed tokens, drafts after them, and how many of
        these have rows. min_worth: least worth of a branch, which gets an additional row; None: a branch takes the row
        of the request's last draft, if that is less likely to be reached, and num_verified is lowered in place.
        """
        at_slots, *columns = int32_addresses(slots, num_tokens, num_pending, num_verified)
        num = native.library().faser_pick_branches(
            slots.size,
            at_slots,
            sampling_address(sampling),
            *columns,
            acceptance.address,
            min_worth is None,
            min_worth or 0.0,
            self._max_branches,
            min(self._max_num, room),
            *self._addresses,
        )
        if num < 0:
            native.check(num, f"picking branches of {slots.size} requests")
        found: Int32Array = self._found[:, :num].copy()
        return found
