"""What the steps of one plan took and brought: all of them, by the clock and the count of tokens, at no one's expense.

Looking at steps one by one takes the host's time, so only a few are looked at, and a few steps of a few requests say
little of how many tokens a step brings. Clock and count are there anyway.
"""

from __future__ import annotations

from faser_trtllm.policy.base import StepView

WARM_UP_STEPS = 2  # after a change of what runs: caches are cold, and the draft model makes up for what it has missed


class Period:
    """rate: tokens per ms that the arm in charge would bring, for what is lost. promise: tokens per ms of the machine's
    usual speed that these steps are to bring, from now on. is_change: whether another arm ran before, so that the
    first steps tell nothing of those that follow."""

    def __init__(self, rate: float = 0.0, promise: float = 0.0, *, is_change: bool = False) -> None:
        self.rate = rate
        self.promise = promise
        self.tokens = 0  # of all steps but the first ones
        self.expected = 0.0  # that were promised for the time they took, without what learning took
        self.lost = 0.0  # tokens of all steps that the arm in charge would have brought, less those that came
        self.is_open = False  # whether all is begun, so that begin_step() need not be called
        self._left = WARM_UP_STEPS if is_change else 0
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
        if self._left:
            self._left -= 1
        else:
            self._warm = view
            self.is_open = True

    def end_steps(self, view: StepView, slowness: float) -> None:
        """The last step that counts is over, and another one begins or a pause. slowness: of the machine just now."""
        begun, warm = self._begun, self._warm
        if begun is not None:
            ms = 1e3 * (view.now_s - begun.now_s)
            self.lost += self.rate * ms - (view.num_generated - begun.num_generated)
        if warm is not None:
            learning_s = view.learning_s - warm.learning_s
            self.tokens += view.num_generated - warm.num_generated
            self.expected += self.promise * 1e3 * max(0.0, view.now_s - warm.now_s - learning_s) / slowness
        self._begun = self._warm = None
        self.is_open = False
