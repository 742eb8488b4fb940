"""Functions that write the results of a pass into its requests."""

from __future__ import annotations

from faser_trtllm.core.plan import DraftResult, OutputEnd, RequestOutput, ScheduledRequests, VerifyResult
from faser_trtllm.core.request import FinishReason, Request
from faser_trtllm.ops.requests.commit import GOES_ON, LENGTH, STOP, Committer

_REASONS = {GOES_ON: None, STOP: FinishReason.STOP, LENGTH: FinishReason.LENGTH}


def apply_results(
    committer: Committer, rows: ScheduledRequests, drafts: DraftResult, result: VerifyResult, now_s: float
) -> tuple[list[RequestOutput], list[int]]:
    """Commit the tokens of a step; return the requests with new output tokens or an end, and Committed.due."""
    committed = committer.commit(rows, drafts, result, now_s)
    token_ids, num_output = committed.token_ids, committed.num_output
    reasons = [_REASONS[end] for end in committed.ends]
    for index, ended in result.ended.items():
        if reasons[index] is not FinishReason.STOP:  # an end id comes before the failure
            reasons[index] = ended.reason
    outputs: list[RequestOutput] = []
    end = 0
    for request, num_new, reason in zip(rows.requests, num_output, reasons, strict=True):
        if num_new or reason is not None:
            begin, end = end, end + num_new
            outputs.append(RequestOutput(request, token_ids[begin:end], reason))
    for index, kept in result.kept_rows.items():
        request, num_kept = rows.requests[index], num_output[index]
        request.output_log_probs.extend(kept.log_probs[:num_kept])
        request.output_tops += kept.tops[:num_kept]
        request.output_logits += kept.logits[:num_kept]
        request.context_log_probs.extend(kept.context_log_probs)
        request.context_tops += kept.context_tops
    return outputs, committed.due


def cut_output(request: Request, end: OutputEnd) -> None:
    """Limit the counts of a request that has ended to what is part of its output."""
    request.num_tokens = request.prompt_len + end.num_output_tokens
    request.stats.num_draft_tokens, request.stats.num_accepted_tokens = end.num_draft_tokens, end.num_accepted_tokens
