"""Predicted goodput of the overlapped modes, from the cost curves of each partition and their interference."""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.policy.base import Mode
from faser_trtllm.policy.draft_costs import FIRST_ROWS

OVERLAPPED = (Mode.DRAFT_AHEAD.value, Mode.PING_PONG.value)
DRAFT, VERIFY = "draft", "verify"


def predict_modes(
    costs: CostTable,
    lengths: Sequence[int],
    num_requests: int,
    base_rows: int,
    context_len: float,
    survival: Sequence[float],
) -> dict[str, float]:
    """Return the tokens per ms of draft_ahead and ping_pong with the lengths chosen for serial.

    Empty if the pair of partitions was not measured. survival: expected, by position.

    draft_ahead: while the target verifies L drafts, L more are drafted after them. These are of use if all L pass (no
    bonus token is drawn then). Otherwise the next step has nothing pending and runs one row per request while drafting.
    ping_pong: two halves of the batch take turns, so a token costs the longer of drafting and verification for half a
    batch each.
    """
    pair = costs.interference_of(DRAFT, VERIFY)
    if pair is None or not costs.has("verify", VERIFY) or not costs.has("draft_step", DRAFT):
        return {}
    length, slots = max(lengths), sum(lengths)
    if length == 0:
        return {}
    mean_length = slots / num_requests
    gained = sum(survival[:length]) * (mean_length / length)  # per request, as planned
    draft_ms = pair.draft_factor * _draft_ms(costs, length, num_requests, context_len)
    verify_ms = pair.verify_factor * costs.verify_ms(base_rows + slots, num_requests, context_len, VERIFY)
    empty_ms = pair.verify_factor * costs.verify_ms(base_rows, num_requests, context_len, VERIFY)
    overhead = costs.overhead_ms
    passes = survival[length - 1]
    # With the chance `passes` the next step has drafts again; otherwise a step without drafts comes first.
    full_ms = max(draft_ms, verify_ms) + overhead
    bubble_ms = max(draft_ms, empty_ms) + overhead
    ahead_tokens = num_requests * (gained + 1.0 - passes) + (1.0 - passes) * num_requests
    ahead = ahead_tokens / (full_ms + (1.0 - passes) * bubble_ms)
    found = {Mode.DRAFT_AHEAD.value: ahead}
    if num_requests >= 2:
        half = num_requests // 2
        half_draft = pair.draft_factor * _draft_ms(costs, length, num_requests - half, context_len)
        half_rows = base_rows - half + (slots + 1) // 2
        half_verify = pair.verify_factor * costs.verify_ms(half_rows, num_requests - half, context_len, VERIFY)
        half_ms = max(half_draft, half_verify) + overhead
        found[Mode.PING_PONG.value] = num_requests * (1.0 + gained) / (2.0 * half_ms)
    return found


def _draft_ms(costs: CostTable, length: int, num_requests: int, context_len: float) -> float:
    """Return ms of a draft call of length steps; the first one also runs tokens committed since the last call."""
    first_ms = costs.draft_rows_ms(round(FIRST_ROWS * num_requests), num_requests, context_len, DRAFT)
    return first_ms + (length - 1) * costs.draft_step_ms(num_requests, context_len, DRAFT)
