"""Which tokens are worth a row beside the drafts: at a place whose draft may be rejected, the draft model's runner-up,
which may be what the target says there.

A chain of drafts with such branches is a token tree. Its test needs no rule of its own: where the chain's test ends
with the token of a branch, that token is committed already, and the branch's row is the row behind it, run early.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.value import value
from faser_trtllm.ops.acceptance import MAX_MARGIN, AcceptanceModel, is_certain
from faser_trtllm.ops.arrays import SAMPLING_DTYPE, SamplingArray, address_of, float32_at, int32_at
from faser_trtllm.ops.draft_stop import sigmoid

SHARE = (0.6, 0.43, 0.29)  # kShare: of rejections those that the runner-up recovers, by sampling mode


@value
class Branches:
    """In the order of requests and places. requests: indices of the requests; places: of the rows whose drafts the
    tokens might replace, 0 for the row of the last committed token; token_ids."""

    requests: list[int]
    places: list[int]
    token_ids: list[int]


class BranchPicker:
    """Writes to buffers that are allocated once."""

    def __init__(self, max_branches: int, max_num: int) -> None:
        """max_branches: of a request; max_num: of a batch."""
        self._max_branches, self._max_num = max_branches, max_num
        self._found = np.zeros((3, max(1, max_num)), np.int32)
        self._addresses = [address_of(row, np.int32) for row in self._found]

    def pick(
        self,
        sampling: SamplingArray,
        slots: Sequence[int],
        num_tokens: Sequence[int],
        num_pending: Sequence[int],
        num_verified: Sequence[int],
        acceptance: AcceptanceModel | None,
        min_worth: float,
        room: int,
    ) -> Branches:
        """Of each request its most worthy branches, of min_worth at least, `room` in all at most.

        num_tokens, num_pending, num_verified: committed tokens, drafts behind them, and how many of these have rows.
        acceptance: None takes the drafts' margins for their log-odds.
        """
        arrays = [np.array(column, np.int32) for column in (slots, num_tokens, num_pending, num_verified)]
        at_slots, *counts = (address_of(column, np.int32) for column in arrays)
        num = native.library().faser_pick_branches(
            len(slots),
            at_slots,
            address_of(sampling, SAMPLING_DTYPE),
            *counts,
            None if acceptance is None else acceptance.address,
            min_worth,
            self._max_branches,
            min(self._max_num, room),
            *self._addresses,
        )
        if num < 0:
            native.check(num, f"picking branches of {len(slots)} requests")
        return Branches(*self._found[:, :num].tolist())


def pick_branches_reference(
    sampling: SamplingArray,
    slots: Sequence[int],
    num_tokens: Sequence[int],
    num_pending: Sequence[int],
    num_verified: Sequence[int],
    acceptance: AcceptanceModel | None,
    min_worth: float,
    max_branches: int,
    max_num: int,
) -> Branches:
    """BranchPicker.pick in plain loops."""
    requests: list[int] = []
    places: list[int] = []
    token_ids: list[int] = []
    for i, (slot, known, pending, verified) in enumerate(
        zip(slots, num_tokens, num_pending, num_verified, strict=True)
    ):
        entry = sampling[slot]
        found = []
        survival = 1.0
        for place in range(min(verified + 1, pending)):
            position = known + place
            margin = float(float32_at(int(entry["draft_margins"]), position + 1)[-1])
            if acceptance is None or is_certain(entry, position):
                accepted = sigmoid(margin)
            else:
                accepted = acceptance.at(int(entry["mode"]), place, min(margin, MAX_MARGIN))
            token = int(int32_at(int(entry["draft_runners_up"]), position + 1)[-1])
            if token >= 0 and not is_certain(entry, position):
                found.append((SHARE[entry["mode"]] * survival * (1.0 - accepted), place, token))
            survival *= accepted
        best = sorted(found, key=lambda branch: -branch[0])[: min(max_branches, max_num - len(requests))]
        for _, place, token in sorted((b for b in best if b[0] >= min_worth), key=lambda branch: branch[1]):
            requests.append(i)
            places.append(place)
            token_ids.append(token)
    return Branches(requests, places, token_ids)
