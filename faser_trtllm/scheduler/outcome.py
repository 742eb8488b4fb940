"""What a policy learns of a step, gathered before the step's tokens are committed."""

from __future__ import annotations

from faser_trtllm.core.decision import StepOutcome
from faser_trtllm.core.plan import DraftResult, SchedulerOutput, VerifyResult


def step_outcome(plan: SchedulerOutput, drafts: DraftResult, result: VerifyResult) -> StepOutcome:
    """Lists in the order of plan.view.decoding."""
    verified = plan.verified
    pending = [plan.scheduled[i].request.num_drafts + drafts.num_new_drafts[i] for i in verified]
    accepted = [result.num_accepted[i] for i in verified]
    # A recovered token stands where a draft was rejected; a bonus token stands where none was pending.
    tested = [
        accepted[k] + (not result.carried[i] and accepted[k] < pending[k] and result.num_tokens[i] > accepted[k])
        for k, i in enumerate(verified)
    ]
    num_context_rows = sum(s.num_new_tokens for s in plan.scheduled if not s.request.is_decoding)
    return StepOutcome(
        plan.view.decoding,
        pending,
        [result.num_verified[i] for i in verified],
        [result.num_pruned[i] for i in verified] if result.num_pruned else [0] * len(verified),
        tested,
        accepted,
        sum(drafts.num_new_drafts),
        num_context_rows + len(verified) + sum(result.num_verified),
        num_context_rows,
        drafts.num_rows,
        plan.view.num_waiting,
        drafts.draft_ms,
        result.verify_ms,
        result.step_ms,
        plan.mode,
        plan.view.now_s,
    )
