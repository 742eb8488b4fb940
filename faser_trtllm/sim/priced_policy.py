"""A policy whose planning takes the time that a step costs the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.decision import DraftPlan, ExitView, StepOutcome, StepView
from faser_trtllm.policy.base import Policy


class PricedPolicy:
    """Policy (policy/base.py) that passes everything on to `inner`."""

    def __init__(self, inner: Policy, clock: ManualClock, overhead_ms: float) -> None:
        self._inner = inner
        self._clock = clock
        self._overhead_s = 1e-3 * overhead_ms

    @property
    def name(self) -> str:
        return self._inner.name

    def plan(self, view: StepView) -> DraftPlan:
        self._clock.advance(self._overhead_s)
        return replace(self._inner.plan(view), num_held=0)  # every step takes the host's time

    def frontier_lengths(self, view: StepView, num_pending: Sequence[int]) -> list[int]:
        return self._inner.frontier_lengths(view, num_pending)

    def exit_boundaries(self, view: StepView, num_rows: int) -> Sequence[int]:
        return self._inner.exit_boundaries(view, num_rows)

    def keep_rows(self, view: StepView, exit_view: ExitView) -> list[int]:
        return self._inner.keep_rows(view, exit_view)

    def wants_outcome(self, is_speculative: bool) -> bool:
        return self._inner.wants_outcome(is_speculative)

    def observe(self, outcome: StepOutcome) -> None:
        self._inner.observe(outcome)
