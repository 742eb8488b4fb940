"""The token budget: the division of a pass's max_num_tokens target rows.

As in TensorRT-LLM's micro-batch scheduler, a decoding request costs 1 + its drafts, a context costs its chunk, and
chunks that do not finish are aligned down to chunk_unit_size. There are two deliberate differences: every decoding
request keeps its one row when rows are short (drafts give way first), and one chunk unit is reserved for contexts, so
that drafts cannot starve a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from faser_trtllm.core.counts import are_decoding
from faser_trtllm.core.plan import ScheduledRequest
from faser_trtllm.core.request import Request, counts_of
from faser_trtllm.scheduler.limits import SchedulerLimits
from faser_trtllm.scheduler.roles import Role, Roles

MAX_CONTEXT_LOGITS = 64
"""Limit on prompt rows with logits per pass, since they take longer than other rows and all requests wait for them."""


def split_running(running: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Return the running requests that decode, and the others."""
    decodes = are_decoding(counts_of(running))
    if decodes.all():
        return list(running), []
    columns = list(zip(running, decodes.tolist(), strict=True))
    return [r for r, is_decoding in columns if is_decoding], [r for r, is_decoding in columns if not is_decoding]


def share_draft_rows(
    decoding: Sequence[Request],
    lengths: Sequence[int],
    roles: Roles,
    contexts: Sequence[Request],
    limits: SchedulerLimits,
) -> dict[int, int]:
    """Return, by slot, how many drafts of each decoding request that runs may have rows, first come, first served,
    after the rows that are kept for the first context. lengths: of the drafts that each should have."""
    wanted = {
        request.slot: max(request.num_drafts, min(length, request.draft_limit))
        for request, length in zip(decoding, lengths, strict=True)
        if roles.get(request.slot) is not Role.NONE
    }
    num_rows = limits.max_num_tokens - len(wanted)
    num_rows -= context_reserve(contexts, num_rows, limits)
    shares = {}
    for slot, length in wanted.items():
        shares[slot] = min(length, num_rows)
        num_rows -= shares[slot]
    return shares


class RowsLeft:
    """The rows of a pass that are left for contexts, and how many of them may have logits."""

    def __init__(
        self,
        limits: SchedulerLimits,
        num_taken: int = 0,
        scheduled: Iterable[ScheduledRequest] = (),
        *,
        num_others: int = 0,
    ) -> None:
        """num_taken: rows of decoding requests, all with logits. scheduled: other requests that already have rows.
        num_others: contexts that need logits of one row; those that need logits of all rows leave room for them."""
        self._limits = limits
        self.num_rows = limits.max_num_tokens - num_taken
        self.num_logits = (limits.max_logit_rows or limits.max_num_tokens) - num_taken
        self._num_context_logits = min(self.num_logits - min(num_others, self.num_logits // 2), MAX_CONTEXT_LOGITS)
        for item in scheduled:
            self.take(item)

    def take(self, item: ScheduledRequest) -> None:
        num_rows = item.num_new_tokens + item.max_verified
        self.num_rows -= num_rows
        if item.request.lacks_context_log_probs:
            self.num_logits -= num_rows
            self._num_context_logits -= num_rows
        else:
            self.num_logits -= min(num_rows, 1 + item.max_verified)

    def chunk_length(self, request: Request) -> int:
        """Return how many committed tokens of a context run in this pass; 0 if it has to wait."""
        if request.lacks_context_log_probs:  # every row needs logits, and fewer rows of a pass can have them
            remaining = request.num_tokens - request.num_computed_tokens
            return max(0, min(remaining, self.num_rows, self.num_logits, self._num_context_logits))
        return chunk_length(request, self.num_rows, self._limits) if self.num_logits > 0 else 0


def chunk_length(request: Request, num_rows: int, limits: SchedulerLimits) -> int:
    """Return how many committed tokens of a context run, given the rows that are left; 0 if it has to wait."""
    remaining = request.num_tokens - request.num_computed_tokens
    if remaining <= num_rows:
        return remaining
    if runs_whole(request, limits):
        return 0
    return num_rows // limits.chunk_unit * limits.chunk_unit


def context_reserve(contexts: Sequence[Request], num_rows: int, limits: SchedulerLimits) -> int:
    """Return the rows reserved for the first context, out of the num_rows that decoding requests leave."""
    if not contexts:
        return 0
    remaining = contexts[0].num_tokens - contexts[0].num_computed_tokens
    if runs_whole(contexts[0], limits):
        return remaining if remaining <= num_rows else 0  # it waits for decoding requests to end, not for drafts
    return min(remaining, limits.chunk_unit, num_rows)


def runs_whole(request: Request, limits: SchedulerLimits) -> bool:
    """Return True if a context runs in one piece: without chunking, unless it has grown longer than a pass.

    Such a preempted request is chunked to its end: its last piece could otherwise wait forever for rows that newer
    requests take.
    """
    return not limits.enable_chunked_context and request.num_tokens <= limits.max_num_tokens
