"""What becomes of a plan's promise: the controller is told once all drafts of its steps are tested."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from faser_trtllm.core.value import value
from faser_trtllm.policy.controller import Controller
from faser_trtllm.policy.goodput import step_ms
from faser_trtllm.policy.measured_costs import MeasuredCosts
from faser_trtllm.policy.period import Period


@value
class Promise:
    """That an arm will do as predicted. lengths: of the drafts, with which a step was predicted to take step_ms; empty
    where that is not known."""

    arm: str
    size: int
    lengths: Sequence[int]
    step_ms: float
    context_len: float


class Judge:
    """settling_steps: after so many steps every draft that was pending is tested."""

    def __init__(self, controller: Controller, costs: MeasuredCosts, settling_steps: int) -> None:
        self._controller = controller
        self._costs = costs
        self._settling_steps = settling_steps
        self._lost: float | None = None  # tokens, by the last plan if it was a trial
        self._unsettled: deque[tuple[int, Promise, Period]] = deque()  # with the number of the step after its last

    @property
    def is_paid(self) -> bool:
        """Whether the last trial has paid for all that it cost."""
        return self._lost is None

    def end_plan(self, step: int, promise: Promise | None, period: Period) -> None:
        """What the plan brought is told of its arm once all is tested. A trial pays for what it has lost, and for the
        cold caches that it leaves to the plan behind it. promise: None of a plan that is not to be judged. step: the
        number of steps so far.

        A promise is brought up to date with what was learnt of costs meanwhile, so that no factor corrects it again.
        """
        controller = self._controller
        if self._lost is not None:
            controller.charge(self._lost + period.lost_cold)
        self._lost = period.lost if controller.is_trial else None
        if promise is not None and period.tokens > 0:
            self._unsettled.append((step, promise, period))
        while self._unsettled and self._unsettled[0][0] <= step - self._settling_steps:
            _, done, brought = self._unsettled.popleft()
            expected = brought.expected
            if done.lengths:
                costs = self._costs.costs(len(done.lengths), len(done.lengths), done.context_len)
                expected *= done.step_ms / step_ms(done.lengths, costs)
            controller.record(done.size, done.arm, brought.tokens, expected)
