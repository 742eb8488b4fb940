"""The outcome of a step per request, for reports: the same before and after the step's tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.core.decision import StepOutcome
from faser_trtllm.core.plan import DraftResult, SchedulerOutput, VerifyResult


def step_outcome(plan: SchedulerOutput, drafts: DraftResult, result: VerifyResult) -> StepOutcome:
    """Lists in the order of plan.view.decoding."""
    scheduled, verified = plan.scheduled, plan.verified
    num_context_rows = 0
    zeros = (0,) * len(scheduled)
    num_pruned, num_pending = result.num_pruned or zeros, result.num_pending or zeros
    columns: list[Sequence[int]] = [num_pending, result.num_tokens, result.carried]
    columns += [result.num_accepted, result.num_verified, num_pruned]
    if len(verified) < len(scheduled):
        num_context_rows = sum(scheduled.num_new_tokens) - len(verified)
        columns = [[column[i] for i in verified] for column in columns]
    pending, num_tokens, carried, num_accepted, num_verified, num_pruned = columns
    decoding = plan.view.decoding
    # A recovered token replaces a rejected draft; a bonus token follows the last pending one.
    tested = [
        accepted + (accepted < limit and tokens > accepted and not is_carried)
        for accepted, limit, tokens, is_carried in zip(num_accepted, pending, num_tokens, carried, strict=True)
    ]
    return StepOutcome(
        decoding=decoding,
        num_pending=pending,
        num_verified=num_verified,
        num_pruned=num_pruned,
        num_tested=tested,
        num_accepted=num_accepted,
        num_drafted=sum(drafts.num_new_drafts),
        num_rows=num_context_rows + len(verified) + sum(result.num_verified),
        num_context_rows=num_context_rows,
        num_draft_rows=drafts.num_rows,
        num_waiting=plan.view.num_waiting,
        draft_ms=drafts.draft_ms,
        verify_ms=result.verify_ms,
        step_ms=result.step_ms,
        mode=plan.mode,
        now_s=plan.view.now_s if plan.begun_s is None else plan.begun_s,
    )
