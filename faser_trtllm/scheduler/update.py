"""What a pass found, written into one request."""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.core.plan import DraftResult, ScheduledRequest, VerifyResult
from faser_trtllm.core.request import FinishReason, Request


def apply_result(
    index: int, scheduled: ScheduledRequest, drafts: DraftResult, result: VerifyResult, now_s: float
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Commit the tokens of scheduled, the index-th of its plan -> new output tokens, and why it ended (or None)."""
    request = scheduled.request
    request.num_drafts += drafts.num_new_drafts[index]
    request.num_draft_computed_tokens = drafts.num_draft_computed[index]
    request.stats.num_draft_tokens += drafts.num_new_drafts[index]
    if not scheduled.reaches_end:
        request.num_computed_tokens += scheduled.num_new_tokens
        return (), None
    return _commit(request, index, result, now_s)


def _commit(
    request: Request, index: int, result: VerifyResult, now_s: float
) -> tuple[tuple[int, ...], FinishReason | None]:
    old, num_new, num_accepted = request.num_tokens, result.num_tokens[index], result.num_accepted[index]
    token_ids = result.token_ids[index]
    if num_new:
        if num_new > num_accepted:  # accepted drafts are in place already, the one token that was drawn is not
            request.tokens[old + num_accepted] = token_ids[num_accepted]
        request.num_tokens = old + num_new
        request.stats.num_accepted_tokens += num_accepted
        request.stats.num_steps += 1
        if result.num_pruned:
            request.stats.num_pruned_rows += result.num_pruned[index]
        if request.stats.first_token_s is None:
            request.stats.first_token_s = now_s
        request.stats.last_token_s = now_s
    # The last committed token has not been run: it was drawn or accepted on the row before it.
    request.num_computed_tokens = request.num_tokens - 1
    if result.carried[index]:
        request.num_drafts -= num_accepted
    else:
        request.num_drafts = 0
        # The token that was drawn is not the draft that stood there, so the draft's KV ends before it.
        request.num_draft_computed_tokens = min(request.num_draft_computed_tokens, request.num_tokens - 1)
    num_kept, reason = _cut_at_end_id(request, token_ids, num_new)
    if request.keeps_rows and index in result.kept_rows:
        rows = result.kept_rows[index]
        request.output_log_probs += rows.log_probs[:num_kept]
        request.output_logits += rows.logits[:num_kept]
    if reason is None:
        if result.failed[index]:
            reason = FinishReason.ERROR
        elif index in result.completed:
            reason = FinishReason.STOP
        elif result.exhausted[index] or request.num_tokens >= request.max_num_tokens:
            reason = FinishReason.LENGTH
    return tuple(token_ids[:num_kept]), reason


def _cut_at_end_id(request: Request, token_ids: Sequence[int], num_new: int) -> tuple[int, FinishReason | None]:
    """-> how many of the new tokens are output. An end id ends the request; it and what follows are none."""
    end_ids = request.params.end_ids
    if end_ids:
        for place in range(num_new):
            if token_ids[place] in end_ids:
                request.num_tokens -= num_new - place
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
                return place, FinishReason.STOP
    return num_new, None
