"""Writes the results of a pass into one request."""

from __future__ import annotations

from faser_trtllm.core.plan import DraftResult, ScheduledRequest, VerifyResult
from faser_trtllm.core.request import FinishReason, Request


def apply_result(
    index: int, scheduled: ScheduledRequest, drafts: DraftResult, result: VerifyResult, now_s: float
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Commit the tokens of scheduled, the index-th of its plan -> new output tokens, and why it ended (or None).

    In one function, since calls would take a third of its time per request and step.
    """
    request, stats = scheduled.request, scheduled.request.stats
    num_drafted = drafts.num_new_drafts[index]
    if num_drafted:
        request.num_drafts += num_drafted
        stats.num_draft_tokens += num_drafted
    request.num_draft_computed_tokens = drafts.num_draft_computed[index]
    if not scheduled.reaches_end:
        request.num_computed_tokens += scheduled.num_new_tokens
        return (), None
    num_new, num_accepted = result.num_tokens[index], result.num_accepted[index]
    new_token_ids = tuple(result.token_ids[index][:num_new])
    if num_new:
        if num_new > num_accepted:  # accepted drafts are already in place, unlike the one drawn token
            request.tokens[request.num_tokens + num_accepted] = new_token_ids[num_accepted]
        request.num_tokens += num_new
        stats.num_accepted_tokens += num_accepted
        stats.num_steps += 1
        if result.num_pruned:
            stats.num_pruned_rows += result.num_pruned[index]
        if stats.first_token_s is None:
            stats.first_token_s = now_s
        stats.last_token_s = now_s
    # The last committed token has not been run: it was drawn or accepted on the previous row.
    request.num_computed_tokens = num_computed = request.num_tokens - 1
    if result.carried[index]:
        request.num_drafts -= num_accepted
    else:
        request.num_drafts = 0
        # The drawn token differs from the draft at its position, so the draft's KV ends before it.
        if request.num_draft_computed_tokens > num_computed:
            request.num_draft_computed_tokens = num_computed
    reason = None
    end_ids = request.params.end_ids
    for token in new_token_ids:
        if token in end_ids:
            new_token_ids, reason = _cut_at_end_id(request, new_token_ids, token), FinishReason.STOP
            break
    if request.keeps_rows and index in result.kept_rows:
        rows, num_kept = result.kept_rows[index], len(new_token_ids)
        request.output_log_probs += rows.log_probs[:num_kept]
        request.output_logits += rows.logits[:num_kept]
    if reason is None:
        if result.failed[index]:
            reason = FinishReason.ERROR
        elif index in result.completed:
            reason = FinishReason.STOP
        elif result.exhausted[index] or request.num_tokens >= request.max_num_tokens:
            reason = FinishReason.LENGTH
    return new_token_ids, reason


def _cut_at_end_id(request: Request, new_token_ids: tuple[int, ...], end_id: int) -> tuple[int, ...]:
    """Remove the first end_id and all tokens after it; neither is output."""
    kept = new_token_ids[: new_token_ids.index(end_id)]
    request.num_tokens -= len(new_token_ids) - len(kept)
    request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
    return kept
