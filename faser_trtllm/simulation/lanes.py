"""The two lanes of a simulated step: drafting runs first, and its simulated time overlaps verification."""

from __future__ import annotations

from collections.abc import Callable

from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.cost_table import ALL
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.core.traffic import Lane, side_by_side
from faser_trtllm.executor.lanes import Drafting, DraftLane, DraftStage
from faser_trtllm.policy.modes import DRAFT, VERIFY
from faser_trtllm.simulation.pass_times import PassTimes
from faser_trtllm.simulation.priced_engine import PricedEngine


class SimulatedLane(DraftLane):
    """An overlapped draft does not depend on the concurrent verification, so it can run before it.

    engines: by role, "target" and "draft"; the lane selects the partition of their costs, and both are slowed while the
    other one runs: by what they draw from memory if the table knows it, else by its interference. host_ms: of a step,
    besides drafting and the pass.
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
        target.beside = None
        if not overlapped:
            return super().draft(plan)
        start_s = self._clock.now_s()
        draft.taken = Lane(0.0, 0.0)
        drafting = _Beside(self._clock)
        drafting.run(self._stage, plan)
        self._clock.advance(start_s - self._clock.now_s())
        drafting.rest = target.beside = RunningLane(draft.taken, self._costs)
        return drafting


class RunningLane:
    """What is left of the draft lane's work while the target runs passes beside it."""

    def __init__(self, work: Lane, costs: PassTimes) -> None:
        self.rest = work
        self._costs = costs

    def run(self, verify: Lane) -> float:
        """A pass that starts now -> its ms. The lane's rest is what is left at the pass's end."""
        rest_ms, verify_ms = side_by_side(self.rest.ms, verify.ms, self._slowdowns(verify))
        left_ms = max(0.0, rest_ms - verify_ms)
        self.rest = Lane(left_ms, self.rest.gb * left_ms / self.rest.ms if self.rest.ms else 0.0)
        return verify_ms

    def _slowdowns(self, verify: Lane) -> tuple[float, float]:
        if self._costs.traffic is not None:
            return self._costs.traffic.slowdowns(self.rest, DRAFT, verify, VERIFY)
        pair = self._costs.interference_of(DRAFT, VERIFY)
        return (pair.draft_factor, pair.verify_factor) if pair else (1.0, 1.0)


class _Beside(Drafting):
    """Waiting for it advances the clock to its end."""

    rest: RunningLane | None = None

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def result(self) -> DraftResult:
        if self.rest is not None:
            self._clock.advance(1e-3 * self.rest.rest.ms)
            self.rest = None
        return super().result()
