"""The best uniform speculative length for the batch size, from cost table and measured acceptance (as TurboSpec)."""

from __future__ import annotations

from faser_trtllm.core.cost_table import CostTable, context_bucket
from faser_trtllm.policy.base import DraftPlan, StatelessPolicy, StepOutcome, StepView
from faser_trtllm.policy.goodput import best_uniform
from faser_trtllm.policy.looks import Looks
from faser_trtllm.policy.measured_costs import MeasuredCosts
from faser_trtllm.policy.survival import SurvivalEstimator

HELD_STEPS = 16  # at most, for which a length is not asked for again
PROBE_STEPS = 256  # without drafting, until one step drafts again to learn


class SchedulePolicy(StatelessPolicy):
    """Knows batch size, context and the mean acceptance by place; no request, no draft and no queue."""

    def __init__(self, max_draft_len: int, costs: CostTable, max_batch_size: int) -> None:
        self.name = "schedule"
        self._max_draft_len = max_draft_len
        self._costs = MeasuredCosts(costs, max_draft_len)
        self.estimator = SurvivalEstimator(max_draft_len, max_batch_size)
        self._lengths: dict[tuple[int, int], int] = {}
        self._version = 0
        self._context_len = 1.0
        self._drafted_step = 0  # when something was drafted last
        self._looks = Looks()
        self._looked: tuple[StepOutcome, float] | None = None  # the last step that was timed, and its context length
        self._next_s: float | None = None  # when the step after it was planned

    def plan(self, view: StepView) -> DraftPlan:
        n = len(view.decoding)
        if n == 0:
            return DraftPlan([])
        if self._looked is not None and self._next_s is None:
            self._next_s = view.now_s - view.learning_s
        self._looks.plan(view.now_s)
        self._looks.pace(view.now_s, view.learning_s)
        self._context_len = sum(request.num_tokens for request in view.decoding) / n
        k = self.length(n, self._context_len)
        k = k or int(self._looks.step >= self._drafted_step + PROBE_STEPS)
        if k:
            self._drafted_step = self._looks.step
        return DraftPlan([k] * n, num_held=self._looks.num_held(k > 0, HELD_STEPS) if self.estimator.is_settled else 0)

    def length(self, num_requests: int, context_len: float) -> int:
        """The length for a batch size; cached until the acceptance is estimated anew."""
        if self._version != self.estimator.version:
            self._version = self.estimator.version
            self._lengths.clear()
        key = (num_requests, context_bucket(context_len))
        k = self._lengths.get(key)
        if k is None:
            costs = self._costs.costs(num_requests, num_requests, context_len)
            expected = self.estimator.population()
            choice = best_uniform(expected, num_requests, float(num_requests), costs, self._max_draft_len)
            k = self._lengths[key] = choice.lengths[0]
        return k

    def wants_outcome(self, is_speculative: bool) -> bool:
        return self._looks.ask(is_speculative, all_tests=is_speculative and not self.estimator.is_settled)

    def observe(self, outcome: StepOutcome) -> None:
        self.estimator.observe(outcome)
        if self._looked is not None:
            self._costs.observe(*self._looked, self._next_s)
        self._looked = (outcome, self._context_len) if self._looks.is_timed else None
        self._next_s = None
