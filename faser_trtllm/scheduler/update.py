"""Writes the results of a pass into its requests."""

from __future__ import annotations

from faser_trtllm.core.plan import DraftResult, RequestOutput, ScheduledRequests, VerifyResult
from faser_trtllm.core.request import FinishReason, Request


def apply_results(
    rows: ScheduledRequests, drafts: DraftResult, result: VerifyResult, now_s: float
) -> list[RequestOutput]:
    """Commit the tokens of a step -> the requests that have new output tokens or ended, and why.

    In one loop, since calls would take a third of its time.
    """
    outputs: list[RequestOutput] = []
    carried, has_failures = result.carried, any(result.failed) or any(result.exhausted)
    columns = (rows.requests, rows.num_new_tokens, drafts.num_new_drafts, drafts.num_draft_computed)
    found = (result.token_ids, result.num_tokens, result.num_accepted)
    for index, (request, num_rows, num_drafted, draft_computed, token_ids, num_new, num_accepted) in enumerate(
        zip(*columns, *found, strict=True)
    ):
        stats = request.stats
        if num_drafted:
            request.num_drafts += num_drafted
            stats.num_draft_tokens += num_drafted
        num_tokens = request.num_tokens
        if request.num_computed_tokens + num_rows != num_tokens:
            request.num_draft_computed_tokens = draft_computed
            request.num_computed_tokens += num_rows
            continue
        new_token_ids = tuple(token_ids[:num_new])
        if num_new:
            if num_new > num_accepted:  # accepted drafts are already in place, unlike the one drawn token
                request.tokens[num_tokens + num_accepted] = new_token_ids[num_accepted]
            request.num_tokens = num_tokens = num_tokens + num_new
            stats.num_accepted_tokens += num_accepted
            stats.num_steps += 1
            if result.num_pruned:
                stats.num_pruned_rows += result.num_pruned[index]
            if stats.first_token_s is None:
                stats.first_token_s = now_s
            stats.last_token_s = now_s
        # The last committed token has not been run: it was drawn or accepted on the previous row.
        request.num_computed_tokens = num_tokens - 1
        if carried[index]:
            request.num_drafts -= num_accepted
        else:
            request.num_drafts = 0
            # The drawn token differs from the draft at its position, so the draft's KV ends before it.
            if draft_computed >= num_tokens:
                draft_computed = num_tokens - 1
        request.num_draft_computed_tokens = draft_computed
        reason = None
        if end_ids := request.params.end_ids:
            for token in new_token_ids:
                if token in end_ids:
                    new_token_ids, reason = _cut_at_end_id(request, new_token_ids, token), FinishReason.STOP
                    break
        if request.keeps_rows and index in result.kept_rows:
            kept, num_kept = result.kept_rows[index], len(new_token_ids)
            request.output_log_probs += kept.log_probs[:num_kept]
            request.output_logits += kept.logits[:num_kept]
        if reason is None and (has_failures or num_tokens >= request.max_num_tokens):
            reason = _end(index, request, result)
        if new_token_ids or reason is not None:
            outputs.append(RequestOutput(request, new_token_ids, reason))
    return outputs


def _end(index: int, request: Request, result: VerifyResult) -> FinishReason | None:
    if result.failed[index]:
        return FinishReason.ERROR
    if index in result.completed:
        return FinishReason.STOP
    if result.exhausted[index] or request.num_tokens >= request.max_num_tokens:
        return FinishReason.LENGTH
    return None


def _cut_at_end_id(request: Request, new_token_ids: tuple[int, ...], end_id: int) -> tuple[int, ...]:
    """Remove the first end_id and all tokens after it; neither is output."""
    kept = new_token_ids[: new_token_ids.index(end_id)]
    request.num_tokens -= len(new_token_ids) - len(kept)
    request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
    return kept
