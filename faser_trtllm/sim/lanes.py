"""The two lanes of a simulated step: drafting runs first, and its time is laid beside the verification's."""

from __future__ import annotations

from collections.abc import Callable

from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.cost_table import ALL, CostTable
from faser_trtllm.core.decision import Mode
from faser_trtllm.core.plan import DraftResult, SchedulerOutput
from faser_trtllm.executor.lanes import Drafting, DraftLane, DraftStage
from faser_trtllm.policy.modes import DRAFT, VERIFY
from faser_trtllm.sim.priced_engine import PricedEngine


class SimulatedLane(DraftLane):
    """Overlapped, a draft sees nothing of the verification that runs beside it, so it may as well run before it.

    engines: by role, "target" and "draft"; the lane says on which partition their passes are priced, and slows both by
    the table's interference of the pair.
    """

    def __init__(
        self,
        stage: DraftStage,
        enter_mode: Callable[[Mode], None],
        engines: dict[str, PricedEngine],
        costs: CostTable,
        clock: ManualClock,
    ) -> None:
        super().__init__(stage, enter_mode)
        self._engines = engines
        self._pair = costs.interference_of(DRAFT, VERIFY)
        self._clock = clock

    def draft(self, plan: SchedulerOutput) -> Drafting:
        target, draft = self._engines["target"], self._engines["draft"]
        overlapped = plan.mode is not Mode.SERIAL
        target.partition, draft.partition = (VERIFY, DRAFT) if overlapped else (ALL, ALL)
        target.slowdown = self._pair.verify_factor if overlapped and self._pair else 1.0
        draft.slowdown = self._pair.draft_factor if overlapped and self._pair else 1.0
        if not overlapped:
            return super().draft(plan)
        start_s = self._clock.now_s()
        drafting = _Beside(self._clock)
        drafting.run(self._stage, plan)
        drafting.end_s = self._clock.now_s()
        self._clock.advance(start_s - drafting.end_s)
        return drafting


class _Beside(Drafting):
    """Waiting for it takes the clock to its end."""

    end_s = 0.0

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def result(self) -> DraftResult:
        self._clock.advance(max(0.0, self.end_s - self._clock.now_s()))
        return super().result()
