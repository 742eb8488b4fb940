"""Times of a pair's steps by the cost model's arithmetic, for equal requests."""

from __future__ import annotations

from lab.costmodel.pair import Pair
from lab.costmodel.traffic import Work, side_by_side


def step_ms(pair: Pair, length: int, num_requests: float, context_len: float) -> float:
    """Return the ms of a step with one draft length: drafting, then verification, on the whole GPU."""
    ms = pair.drafting_ms(length, num_requests, context_len) + pair.host.step_ms
    return ms + pair.verify_ms(num_requests * (1 + length), num_requests, context_len)


def ping_pong_ms(pair: Pair, length: int, num_requests: float, context_len: float, num_drafters: int = 1) -> float:
    """Return the ms in which two half batches, alternating on the two streams, both make a step."""
    half = num_requests / 2
    draft_ms = num_drafters * pair.drafting_ms(length, half, context_len, pair.draft_share)
    verify_ms = pair.verify_ms(half * (1 + length), half, context_len, 1.0 - pair.draft_share)
    draft = Work(draft_ms, num_drafters * length * pair.draft.pass_gb(half, context_len))
    verify = Work(verify_ms, pair.target.pass_gb(half, context_len))
    slowdowns = pair.traffic.slowdowns(draft, "draft", verify, "verify")
    return 2.0 * (max(side_by_side(draft.ms, verify.ms, slowdowns)) + pair.host.step_ms)
