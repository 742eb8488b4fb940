"""A watcher of an executor's steps that keeps where the time of each went, and what rows it had."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.core.plan import DraftResult, SchedulerOutput, VerifyResult
from faser_trtllm.core.request import Request
from faser_trtllm.scheduler.outcome import step_outcome


@dataclass(frozen=True)
class StepTime:
    """One step. num_requests: those that decoded; num_context_rows: of prompts, those that ended in the step as well.

    draft_ms, verify_ms: as the executor's streams took them; both_ms: from the schedule to the verification's end.
    """

    num_requests: int
    num_rows: int
    num_context_rows: int
    num_tokens: int
    schedule_ms: float
    draft_ms: float
    verify_ms: float
    both_ms: float
    update_ms: float

    @property
    def ms(self) -> float:
        return self.schedule_ms + self.both_ms + self.update_ms


class StepTimes:
    """StepWatcher (executor/stats.py). start() forgets what was kept."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.steps: list[StepTime] = []

    def step(
        self,
        plan: SchedulerOutput,
        drafts: DraftResult,
        result: VerifyResult,
        times_s: tuple[float, float, float, float],
    ) -> None:
        outcome = step_outcome(plan, drafts, result)
        begun_s, scheduled_s, verified_s, updated_s = times_s
        self.steps.append(
            StepTime(
                num_requests=len(outcome.decoding),
                num_rows=outcome.num_rows,
                num_context_rows=outcome.num_context_rows,
                num_tokens=sum(result.num_tokens),
                schedule_ms=1e3 * (scheduled_s - begun_s),
                draft_ms=outcome.draft_ms,
                verify_ms=outcome.verify_ms,
                both_ms=1e3 * (verified_s - scheduled_s),
                update_ms=1e3 * (updated_s - verified_s),
            )
        )

    def finished(self, request: Request) -> None:
        """Nothing is kept by request."""
