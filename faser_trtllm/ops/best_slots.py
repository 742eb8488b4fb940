"""Choose the slots that pay: the native argmax over rows that verify a draft each.

Row j of a request yields one token if the drafts up to it are all accepted, so a pass over base rows and slots S yields
the base tokens plus the sum of the survivals of S. Survival never rises along a request, so the n best slots are
prefixes. Before drafting, the longest length is chosen too, since the first slot at a place costs a whole draft step;
so no uniform length is better. The same argmax plans (with expected survivals, drafting not done yet) and ranks drafts
(with survivals by their margins, drafting done). Whether a slot runs may depend on later drafts of its request, since
drafts without a row stay pending: rows decide when a draft is verified, never whether.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.value import value
from faser_trtllm.native.structures import FaserSlotCosts
from faser_trtllm.ops.acceptance import AcceptanceModel
from faser_trtllm.ops.arrays import (
    Float64Array,
    Int32Array,
    SamplingArray,
    address_of,
    int32_addresses,
    sampling_address,
)


class BestSlots(NamedTuple):
    """The chosen slots."""

    lengths: list[int]  # slots per request
    score: float  # tokens / ms, or tokens - price * ms


class SlotCosts:
    """The costs of a step, and what its slots have to bring."""

    def __init__(
        self,
        verify_ms: Float64Array,  # [num_costs], of a pass by its number of slots; more cost as much as the last
        # First and further draft steps [num_requests + 1], by requests that draft; None: all drafts are made.
        draft_ms: tuple[Float64Array, Float64Array] | None = None,
        *,
        fixed_ms: float = 0.0,  # added to every step with slots
        base_tokens: float = 0.0,  # of a step without slots
        price: float = 0.0,  # tokens that a ms must bring; 0: maximize tokens / ms, with at least one slot
        multiple: int = 1,  # consider only multiples of this number of slots
    ) -> None:
        self.verify_ms, self.draft_ms = verify_ms, draft_ms
        self.fixed_ms, self.base_tokens, self.price, self.multiple = fixed_ms, base_tokens, price, multiple
        first, step = (None, None) if draft_ms is None else (address_of(ms, np.float64) for ms in draft_ms)
        self._struct = FaserSlotCosts(
            address_of(verify_ms, np.float64), first, step, fixed_ms, base_tokens, price, verify_ms.size, multiple
        )
        self.address = ctypes.addressof(self._struct)


def best_slots(survival: Float64Array, limits: Int32Array, costs: SlotCosts) -> BestSlots:
    """Return the best slots. survival [num_requests, max_draft_len]: never rising in a row; limits [num_requests]."""
    n, stride = survival.shape
    lengths = np.zeros(n, np.int32)
    score = ctypes.c_double()
    status = native.library().faser_best_slots(
        costs.address,
        n,
        stride,
        address_of(survival, np.float64),
        address_of(limits, np.int32),
        address_of(lengths, np.int32),
        ctypes.addressof(score),
    )
    native.check(status, "choosing slots")
    return BestSlots(lengths.tolist(), score.value)


@value
class VerificationRule:
    """Chooses the pending drafts to verify: those with the most tokens - price * ms, ranked over the batch."""

    acceptance: AcceptanceModel
    costs: SlotCosts

    def row_price(self, num_slots: int, num_more: int) -> float:
        """Return the tokens that a row after num_slots must bring, by the mean cost of the next num_more slots."""
        verify_ms = self.costs.verify_ms
        last = min(num_slots + num_more, verify_ms.size - 1)
        first = max(0, last - num_more)
        return self.costs.price * float(verify_ms[last] - verify_ms[first]) / max(1, last - first)

    def lengths(
        self, sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array, num_pending: Int32Array
    ) -> Int32Array:
        """Return how many drafts to verify, 0 to num_pending[i], of those after num_tokens[i] committed tokens."""
        lengths = np.empty_like(num_pending)
        at_slots, *columns = int32_addresses(slots, num_tokens, num_pending, lengths)
        status = native.library().faser_verify_lengths(
            self.costs.address, self.acceptance.address, slots.size, at_slots, sampling_address(sampling), *columns
        )
        if status:
            native.check(status, f"ranking {num_pending.tolist()} pending drafts")
        return lengths
