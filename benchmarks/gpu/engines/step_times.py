"""A watcher of an executor's steps that records each step's times and rows."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.core.plan import StepRecord
from faser_trtllm.executor.stats import StepWatcher


@dataclass(frozen=True)
class StepTime:
    """One step. num_requests: decoding requests. num_context_rows: rows of prompts.

    draft_ms, verify_ms: times of the executor's streams; both_ms: from the schedule to the verification's end.
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
    """A StepWatcher that keeps step times since start()."""

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
