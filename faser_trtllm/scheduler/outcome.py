"""What a policy learns of a step, gathered before the step's tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.core.decision import StepOutcome
from faser_trtllm.core.plan import DraftResult, SchedulerOutput, VerifyResult


def step_outcome(plan: SchedulerOutput, drafts: DraftResult, result: VerifyResult) -> StepOutcome:
    """Lists in the order of plan.view.decoding."""
    scheduled, verified = plan.scheduled, plan.verified
    num_context_rows = 0
    num_pruned = result.num_pruned or (0,) * len(scheduled)
    columns: list[Sequence[int]] = [drafts.num_new_drafts, result.num_tokens, result.carried]
    columns += [result.num_accepted, result.num_verified, num_pruned]
    if len(verified) < len(scheduled):
        num_context_rows = sum(s.num_new_tokens for s in scheduled if not s.request.is_decoding)
        columns = [[column[i] for i in verified] for column in columns]
    num_new_drafts, num_tokens, carried, num_accepted, num_verified, num_pruned = columns
    decoding = plan.view.decoding
    pending = [request.num_drafts + new for request, new in zip(decoding, num_new_drafts, strict=True)]
    # A recovered token stands where a draft was rejected; a bonus token stands where none was pending.
    tested = [
        accepted + (accepted < limit and tokens > accepted and not is_carried)
        for accepted, limit, tokens, is_carried in zip(num_accepted, pending, num_tokens, carried, strict=True)
    ]
    return StepOutcome(
        decoding,
        pending,
        num_verified,
        num_pruned,
        tested,
        num_accepted,
        sum(drafts.num_new_drafts),
        num_context_rows + len(verified) + sum(result.num_verified),
        num_context_rows,
        drafts.num_rows,
        plan.view.num_waiting,
        drafts.draft_ms,
        result.verify_ms,
        result.step_ms,
        plan.mode,
        (plan.view.now_s if plan.begun_s is None else plan.begun_s) - plan.view.learning_s,
    )
