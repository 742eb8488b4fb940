"""What the steps of one plan took and brought: all of them, by the clock and the count of tokens, at no one's expense.

Looking at steps one by one takes the host's time, so only a few are looked at, and a few steps of a few requests say
little of how many tokens a step brings. Clock and count are there anyway.
"""

from __future__ import annotations

from faser_trtllm.policy.base import StepView
from faser_trtllm.policy.warm_up import WarmUp


class Period:
    """rate: tokens per ms that the arm in charge would bring, for what is lost. promise: tokens per ms of the machine's
    usual speed that these steps are to bring, from now on. is_change: whether another arm ran before, so that the
    first steps tell nothing of those that follow."""

    def __init__(self, rate: float = 0.0, promise: float = 0.0, *, is_change: bool = False) -> None:
        self.rate = rate
        self.promise = promise
        self.tokens = 0  # of all steps but the first ones
        self.ms = 0.0  # that those took, without what learning took
        self.expected = 0.0  # that were promised for that time
        self.lost = 0.0  # tokens of all steps that the arm in charge would have brought, less those that came
        self.lost_cold = 0.0  # the same of the first steps only
        self.is_open = False  # whether all is begun, so that begin_step() need not be called
        self._warm_up = WarmUp() if is_change else None
        self._begun: StepView | None = None
        self._warm: StepView | None = None

    @property
    def lost_ms(self) -> float:
        """The time that the arm in charge would have brought the lost tokens in."""
        return self.lost / self.rate if self.rate else 0.0

    def begin_step(self, view: StepView) -> None:
        """A step begins that counts, and so do those after it until end_steps()."""
        if self._begun is None:
            self._begun = view
        if self._warm_up is None or not self._warm_up.lasts(view.now_s):
            self._warm_up = None
            self.lost_cold += self._lost_between(self._begun, view)
            self._warm = view
            self.is_open = True

    def end_steps(self, view: StepView, slowness: float) -> None:
        """The last step that counts is over, and another one begins or a pause. slowness: of the machine just now."""
        begun, warm = self._begun, self._warm
        if begun is not None:
            lost = self._lost_between(begun, view)
            self.lost += lost
            self.lost_cold += lost if warm is None else 0.0
        if warm is not None:
            learning_s = view.learning_s - warm.learning_s
            ms = 1e3 * max(0.0, view.now_s - warm.now_s - learning_s)
            self.tokens += view.num_generated - warm.num_generated
            self.ms += ms
            self.expected += self.promise * ms / slowness
        self._begun = self._warm = None
        self.is_open = False

    def _lost_between(self, begun: StepView, ended: StepView) -> float:
        return self.rate * 1e3 * (ended.now_s - begun.now_s) - (ended.num_generated - begun.num_generated)
