"""A watcher of an executor's steps that keeps where the time of each went, and what rows it had."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.core.plan import StepRecord
from faser_trtllm.executor.stats import StepWatcher


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


class StepTimes(StepWatcher):
    """start() forgets what was kept."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.steps: list[StepTime] = []

    def step(self, record: StepRecord) -> None:
        self.steps.append(
            StepTime(
                num_requests=record.plan.scheduled.num_decoding,
                num_rows=record.num_rows - record.result.num_branches,
                num_context_rows=record.num_context_rows,
                num_tokens=record.num_tokens,
                schedule_ms=1e3 * (record.scheduled_s - record.begun_s),
                draft_ms=record.drafts.draft_ms,
                verify_ms=record.result.verify_ms,
                both_ms=1e3 * (record.verified_s - record.scheduled_s),
                update_ms=1e3 * (record.updated_s - record.verified_s),
            )
        )
