"""Choose the slots (rows that verify one draft each) that are worth their cost, by a native argmax.

A slot yields one token if all drafts of its request up to it are accepted, so a pass yields its base tokens plus the
sum of its slots' survivals. Survival never rises along a request, so the n best slots are prefixes of the requests'
drafts. Before drafting, the longest length is chosen as well, since the first slot at a place costs a whole draft step;
no uniform length can be better. The argmax plans, with expected survivals, and ranks existing drafts, with survivals
estimated from their margins. Whether a slot runs may depend on later drafts of its request, since drafts without a row
stay pending: rows decide when a draft is verified, never whether.
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
    """The costs of a step, and the tokens that its slots must yield for them."""

    def __init__(
        self,
        verify_ms: Float64Array,  # [num_costs], of a pass by its number of slots; more cost as much as the last
        # Of the first and of each further draft step [num_requests + 1], by drafting requests; None: all drafts exist.
        draft_ms: tuple[Float64Array, Float64Array] | None = None,
        *,
        fixed_ms: float = 0.0,  # added to every step with slots
        base_tokens: float = 0.0,  # of a step without slots
        price: float = 0.0,  # tokens that each ms must yield; 0: maximize tokens / ms, with at least one slot
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
    """Return the best slots. survival fp64 [num_requests, max_draft_len] never rises in a row; limits [num_requests]:
    how many entries of each row count."""
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
    """Chooses the pending drafts to verify: of the whole batch, those that maximize tokens - price * ms."""

    acceptance: AcceptanceModel
    costs: SlotCosts

    def row_price(self, num_slots: int, num_more: int) -> float:
        """Return the tokens that a row after num_slots must yield, from the mean cost of the next num_more slots."""
        verify_ms = self.costs.verify_ms
        last = min(num_slots + num_more, verify_ms.size - 1)
        first = max(0, last - num_more)
        return self.costs.price * float(verify_ms[last] - verify_ms[first]) / max(1, last - first)

    def lengths(
        self, sampling: SamplingArray, slots: Int32Array, num_tokens: Int32Array, num_pending: Int32Array
    ) -> Int32Array:
        """Return how many drafts after num_tokens[i] committed tokens to verify, 0 to num_pending[i] of them."""
        lengths = np.empty_like(num_pending)
        at_slots, *columns = int32_addresses(slots, num_tokens, num_pending, lengths)
        status = native.library().faser_verify_lengths(
            self.costs.address, self.acceptance.address, slots.size, at_slots, sampling_address(sampling), *columns
        )
        if status:
            native.check(status, f"ranking {num_pending.tolist()} pending drafts")
        return lengths
