"""The token budget: how a pass's max_num_tokens target rows are divided.

As in TensorRT-LLM's micro-batch scheduler: a decoding request costs 1 + its drafts, a context costs its chunk, chunks
that do not finish are aligned down to chunk_unit_size. Two deliberate differences: every decoding request keeps its one
row when rows are short (drafts give way first), and one chunk unit is reserved for contexts, so that drafts cannot
starve a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.core.request import Request
from faser_trtllm.scheduler.limits import SchedulerLimits


def share_draft_rows(wanted: Sequence[int], num_rows: int) -> list[int]:
    """Rows for drafts, first come first served, out of num_rows."""
    shares = []
    for length in wanted:
        share = min(length, num_rows)
        num_rows -= share
        shares.append(share)
    return shares


def steady_shares(
    decoding: Sequence[Request], lengths: Sequence[int], num_rows: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Of requests that all decode: drafts pending after drafting, and rows for drafts out of num_rows, first come first
    served. lengths: pending drafts wanted."""
    pending = [request.num_drafts for request in decoding]
    if not any(lengths) and not any(pending):
        return pending, pending
    wanted: list[int] = []
    for request, length, share in zip(decoding, lengths, pending, strict=True):
        if length > share:  # conditions, since min() and max() would take a third of the loop's time
            limit = request.draft_limit
            if limit > share:
                share = length if length < limit else limit
        wanted.append(share)
    if sum(wanted) <= num_rows:
        return wanted, wanted
    shares = share_draft_rows(wanted, num_rows)
    return list(map(max, shares, pending)), shares


def chunk_length(request: Request, num_rows: int, limits: SchedulerLimits) -> int:
    """Committed tokens of a context to run in this pass, given the rows that are left; 0 if it has to wait."""
    remaining = request.num_tokens - request.num_computed_tokens
    if remaining <= num_rows:
        return remaining
    if _runs_whole(request, limits):
        return 0
    return num_rows // limits.chunk_unit * limits.chunk_unit


def context_reserve(contexts: Sequence[Request], num_rows: int, limits: SchedulerLimits) -> int:
    """Rows reserved for the first context, out of the num_rows that decoding requests leave."""
    if not contexts:
        return 0
    remaining = contexts[0].num_tokens - contexts[0].num_computed_tokens
    if _runs_whole(contexts[0], limits):
        return remaining if remaining <= num_rows else 0  # it waits for decoding requests to end, not for drafts
    return min(remaining, limits.chunk_unit, num_rows)


def _runs_whole(request: Request, limits: SchedulerLimits) -> bool:
    """Without chunking a context runs in one piece, unless a preempted request has grown longer than a pass.

    Such a request is chunked to its end: otherwise its last piece could wait forever for rows that newer requests take.
    """
    return not limits.enable_chunked_context and request.num_tokens <= limits.max_num_tokens
