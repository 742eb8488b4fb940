"""References of ops/best_slots.py."""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.ops.arrays import (
    Float64Array,
    Int32Array,
    SamplingArray,
    float32_at,
)
from faser_trtllm.ops.best_slots import BestSlots, SlotCosts, VerificationRule
from faser_trtllm.ops.draft_stop import sigmoid
from lab.reference.acceptance import is_certain, pending_margins


def best_slots_reference(survival: Float64Array, limits: Int32Array, costs: SlotCosts) -> BestSlots:
    """Compute best_slots() in plain loops."""
    rows = [row[:limit] for row, limit in zip(survival.tolist(), limits.tolist(), strict=True)]
    return _choose(rows, costs)


def verify_lengths_reference(
    rule: VerificationRule,
    sampling: SamplingArray,
    slots: Int32Array,
    num_tokens: Int32Array,
    num_pending: Int32Array,
) -> list[int]:
    """Compute VerificationRule.lengths() in plain loops."""
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
