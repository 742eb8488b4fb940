"""Choose the slots that pay: the native argmax over rows that verify a draft each, and its bit-exact reference.

Row j of a request yields one token if the drafts up to it are all accepted, so a pass over base rows and slots S yields
the base tokens plus the sum of the survivals of S. Survival never rises along a request, so the n best slots are
prefixes. Before drafting, the longest length is chosen too, since the first slot at a place costs a whole draft step;
so no uniform length is better. The same argmax plans (with expected survivals, drafting not done yet) and ranks drafts
(with survivals by their margins, drafting done). Whether a slot runs may depend on later drafts of its request, since
drafts without a row stay pending: rows decide when a draft is verified, never whether.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.value import value
from faser_trtllm.ops.acceptance import AcceptanceModel, is_certain, pending_margins
from faser_trtllm.ops.arrays import (
    Float64Array,
    Int32Array,
    SamplingArray,
    address_of,
    float32_at,
    int32_addresses,
    sampling_address,
)
from faser_trtllm.ops.draft_stop import sigmoid


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
        self._struct = native.FaserSlotCosts(
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


def best_slots_reference(survival: Float64Array, limits: Int32Array, costs: SlotCosts) -> BestSlots:
    """best_slots in plain loops."""
    rows = [row[:limit] for row, limit in zip(survival.tolist(), limits.tolist(), strict=True)]
    return _choose(rows, costs)


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


def verify_lengths_reference(
    rule: VerificationRule,
    sampling: SamplingArray,
    slots: Int32Array,
    num_tokens: Int32Array,
    num_pending: Int32Array,
) -> list[int]:
    """VerificationRule.lengths in plain loops."""
    rows = []
    for slot, tokens, pending in zip(*(c.tolist() for c in (slots, num_tokens, num_pending)), strict=True):
        survival, row = 1.0, []
        entry = sampling[slot]
        for place, margin in enumerate(pending_margins(sampling, slot, tokens, pending)):
            if is_certain(entry, tokens + place):
                survival *= sigmoid(float32_at(int(entry["draft_margins"]), tokens + place + 1)[-1])
            else:
                survival *= rule.acceptance.at(int(entry["mode"]), place, margin)
            row.append(survival)
        rows.append(row)
    return _choose(rows, rule.costs).lengths


def _choose(rows: Sequence[Sequence[float]], costs: SlotCosts) -> BestSlots:
    slots = sorted((-survival, place, i) for i, row in enumerate(rows) for place, survival in enumerate(row))
    verify_ms, price = costs.verify_ms.tolist(), costs.price
    deepest = max([1, *map(len, rows)])

    def score_of(tokens: float, ms: float) -> float:
        return tokens - price * ms if price > 0.0 else tokens / ms

    chosen: list[tuple[float, int, int]] = []
    best_score = score_of(costs.base_tokens, verify_ms[0]) if price > 0.0 else 0.0
    for longest in range(1 if costs.draft_ms is not None else deepest, deepest + 1):
        reached = [slot for slot in slots if slot[1] < longest]
        active = [0] * deepest
        tokens, draft_ms = costs.base_tokens, 0.0
        for count, (minus, place, _) in enumerate(reached, 1):
            tokens -= minus
            if costs.draft_ms is not None:
                step_ms = costs.draft_ms[place > 0]
                active[place] += 1
                draft_ms += float(step_ms[active[place]]) - float(step_ms[active[place] - 1])
            if count % costs.multiple:
                continue
            ms = draft_ms + verify_ms[min(count, len(verify_ms) - 1)] + costs.fixed_ms
            score = score_of(tokens, ms)
            if score > best_score:
                chosen, best_score = reached[:count], score
    lengths = [0] * len(rows)
    for _, _, i in chosen:
        lengths[i] += 1
    return BestSlots(lengths, best_score)
