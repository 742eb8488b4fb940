"""What a policy learns of a step, gathered before the step's tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from faser_trtllm.core.decision import StepOutcome
from faser_trtllm.core.plan import DraftResult, SchedulerOutput, VerifyResult

T = TypeVar("T")


def step_outcome(plan: SchedulerOutput, drafts: DraftResult, result: VerifyResult) -> StepOutcome:
    """Lists in the order of plan.view.decoding."""
    scheduled, verified = plan.scheduled, plan.verified
    is_all = len(verified) == len(scheduled)

    def of_verified(values: Sequence[T]) -> Sequence[T]:
        return values if is_all else [values[i] for i in verified]

    num_new, accepted = of_verified(drafts.num_new_drafts), of_verified(result.num_accepted)
    pending = [request.num_drafts + new for request, new in zip(plan.view.decoding, num_new, strict=True)]
    # A recovered token stands where a draft was rejected; a bonus token stands where none was pending.
    tested = [
        num_accepted + (num_accepted < num_pending and num_tokens > num_accepted and not carried)
        for num_accepted, num_pending, num_tokens, carried in zip(
            accepted, pending, of_verified(result.num_tokens), of_verified(result.carried), strict=True
        )
    ]
    num_context_rows = 0 if is_all else sum(s.num_new_tokens for s in scheduled if not s.request.is_decoding)
    return StepOutcome(
        plan.view.decoding,
        pending,
        of_verified(result.num_verified),
        of_verified(result.num_pruned) if result.num_pruned else (0,) * len(verified),
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
