"""The best uniform speculative length for a batch size, from costs and measured acceptance (similar to TurboSpec)."""

from __future__ import annotations

import numpy as np

from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.ops.best_slots import SlotCosts, best_slots
from faser_trtllm.policy.acceptance import AcceptanceEstimator
from faser_trtllm.policy.base import HELD_STEPS, Decision, PlanStats, StepView, mean_context
from faser_trtllm.policy.costs import MeasuredCosts

RETRY_STEPS = 256  # steps without drafting before some steps draft one token each, to learn


class SchedulePolicy:
    """Uses batch size, context and mean acceptance by position, but no single request or draft, nor the queue."""

    def __init__(self, max_draft_len: int, costs: CostTable) -> None:
        self.name = "schedule"
        self._max_draft_len = max_draft_len
        self._costs = MeasuredCosts(costs, max_draft_len)
        self.estimator = AcceptanceEstimator(max_draft_len)
        self._context_len = 1.0
        self._num_idle = 0  # steps since something was drafted

    def plan(self, view: StepView) -> Decision:
        n = len(view.decoding)
        if n == 0:
            return Decision([])
        self.estimator.fit()
        self._context_len = mean_context(view.decoding)
        length = self.length(n, self._context_len)
        if not length and self._num_idle >= RETRY_STEPS:
            length = 1
        return Decision([length] * n, tested=self.estimator.tested, num_held=HELD_STEPS - 1)

    def length(self, num_requests: int, context_len: float) -> int:
        """Return the best length for a batch size; 0 if drafting does not pay."""
        n, k = num_requests, self._max_draft_len
        costs = self._costs.step(n, context_len)
        slot_costs = SlotCosts(
            costs.verify,
            (costs.draft_first, costs.draft_step),
            fixed_ms=costs.host_ms,
            base_tokens=float(n),
            multiple=n,
        )
        survival = np.tile(self.estimator.population(), (n, 1))
        found = best_slots(survival, np.full(n, k, np.int32), slot_costs)
        return found.lengths[0] if found.score > n / costs.off_ms else 0

    def observe(self, stats: PlanStats) -> None:
        self._num_idle = 0 if stats.num_drafted else self._num_idle + stats.num_steps
        self._costs.observe(stats, self._context_len)
