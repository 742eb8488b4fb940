"""Drafting in a simulated step, which runs first while its simulated time overlaps verification."""

from __future__ import annotations

from collections.abc import Callable

from faser_trtllm.core.cost_table import ALL
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.executor.draft_worker import Drafting, DraftStage, DraftWorker
from faser_trtllm.policy.modes import DRAFT, VERIFY
from lab.clock import ManualClock
from lab.costmodel.traffic import Work
from lab.simulation.priced_engine import PassTimes, PricedEngine, RunningDraft


class SimulatedDraftWorker(DraftWorker):
    """A worker that runs an overlapped draft before the verification, on which it does not depend.

    engines: by role, "target" and "draft". The worker selects the partition of their costs; both are slowed while the
    other one runs, by memory traffic if the table has it, else by its interference.
    host_ms: returns the time of a step outside drafting and the pass; called before both.
    """

    def __init__(
        self,
        stage: DraftStage,
        engines: dict[str, PricedEngine],
        costs: PassTimes,
        clock: ManualClock,
        host_ms: Callable[[SchedulerOutput], float],
    ) -> None:
        super().__init__(stage)
        self._host_ms = host_ms
        self._engines = engines
        self._costs = costs
        self._clock = clock

    def draft(self, plan: SchedulerOutput) -> Drafting:
        self._clock.advance(1e-3 * self._host_ms(plan))
        if "draft" not in self._engines:
            return super().draft(plan)
        target, draft = self._engines["target"], self._engines["draft"]
        overlapped = plan.mode is not Mode.SERIAL
        target.partition, draft.partition = (VERIFY, DRAFT) if overlapped else (ALL, ALL)
        target.concurrent = None
        if not overlapped:
            return super().draft(plan)
        start_s = self._clock.now_s()
        draft.taken = Work(0.0, 0.0)
        drafting = _Concurrent(self._clock)
        drafting.run(self._stage, plan)
        self._clock.advance(start_s - self._clock.now_s())
        drafting.rest = target.concurrent = RunningDraft(draft.taken, self._costs)
        return drafting


class _Concurrent(Drafting):
    """An overlapped draft; waiting for it advances the clock to its end."""

    rest: RunningDraft | None = None

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def result(self) -> DraftResult:
        if self.rest is not None:
            self._clock.advance(1e-3 * self.rest.rest.ms)
            self.rest = None
        return super().result()
