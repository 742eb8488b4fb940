"""Choose tokens that are worth a row besides the drafts: where a draft may be rejected, the draft model's runner-up,
which the target may choose instead.

A chain of drafts with such branches is a token tree. It needs no verification rule of its own: if the chain's
verification ends with a branch's token, that token is committed, and the branch's row is the row after it, run early.
"""

from __future__ import annotations

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.sampling_params import NUM_MODES
from faser_trtllm.ops.acceptance import MAX_MARGIN, AcceptanceModel, is_certain
from faser_trtllm.ops.arrays import (
    Int32Array,
    SamplingArray,
    address_of,
    float32_at,
    int32_addresses,
    int32_at,
    sampling_address,
)
from faser_trtllm.ops.draft_stop import sigmoid

SHARE = (0.6, 0.43, 0.29)  # by sampling mode, the share of rejections that the runner-up recovers (kShare)
PRIOR = ((1.7, -0.6), (1.3, -0.7), (0.7, -0.1))  # slope and intercept by sampling mode, if none are fitted


def prior_acceptance(max_draft_len: int) -> AcceptanceModel:
    """Return the model of policies that learn nothing: between those of the demo's draft model and EAGLE-3 head."""
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
        num_branches] of the request, the place of the row whose draft the token might replace (0: the row of the last
        committed token), and the token.

        num_tokens, num_pending, num_verified [num_requests] int32: committed tokens, drafts after them, and how many of
        these have rows; num_verified is lowered in place where branches take rows. min_worth: of a branch with an
        additional row; None: it takes the row of the request's last draft, if that is less likely to be reached.
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


def pick_branches_reference(
    sampling: SamplingArray,
    slots: Int32Array,
    num_tokens: Int32Array,
    num_pending: Int32Array,
    num_verified: Int32Array,
    acceptance: AcceptanceModel,
    min_worth: float | None,
    max_branches: int,
    max_num: int,
) -> Int32Array:
    """BranchPicker.pick in plain loops."""
    branches: list[tuple[int, int, int]] = []
    columns = (column.tolist() for column in (slots, num_tokens, num_pending, num_verified))
    for i, (slot, known, pending, length) in enumerate(zip(*columns, strict=True)):
        entry = sampling[slot]
        found = []
        reached = [1.0]
        for place in range(min(length + 1, pending)):
            position = known + place
            margin = float(float32_at(int(entry["draft_margins"]), position + 1)[-1])
            if is_certain(entry, position):
                accepted = sigmoid(margin)
            else:
                accepted = acceptance.at(int(entry["mode"]), place, min(margin, MAX_MARGIN))
            token = int(int32_at(int(entry["draft_runners_up"]), position + 1)[-1])
            if token >= 0 and not is_certain(entry, position):
                found.append((SHARE[entry["mode"]] * reached[-1] * (1.0 - accepted), place, token))
            reached.append(reached[-1] * accepted)
        best = sorted(found, key=lambda branch: -branch[0])[: min(max_branches, max_num - len(branches))]
        if min_worth is None:
            best = [b for k, b in enumerate(best) if k < length and b[0] > reached[length - k]]
            length -= len(best)
        taken = [b for b in best if min_worth is None or b[0] >= min_worth]
        for _, place, token in sorted(taken, key=lambda branch: branch[1]):
            branches.append((i, place, token))
        num_verified[i] = length
    picked: Int32Array = np.array(branches, np.int32).reshape(-1, 3).T
    return picked
