"""What the steps of one plan took and brought: all of them, by the clock and the count of tokens, at no one's expense.

Looking at steps one by one takes the host's time, so only a few are looked at, and a few steps of a few requests say
little of how many tokens a step brings. Clock and count are there anyway.
"""

from __future__ import annotations

from faser_trtllm.policy.base import StepView

MAX_EXCESS = 5.0  # of a step over the mean of those before it: what is longer is somebody else's work
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
        self._left = WARM_UP_STEPS if is_change else 0
        self._ms, self._num_steps = 0.0, 0
        self._view: StepView | None = None

    @property
    def lost_ms(self) -> float:
        """The time that the arm in charge would have brought the lost tokens in."""
        return self.lost / self.rate if self.rate else 0.0

    def begin_step(self, view: StepView) -> None:
        """A step begins that counts; without this call the time up to the next one is nobody's."""
        self._view = view

    def end_step(self, view: StepView, slowness: float) -> None:
        """The step has ended and another one begins, or a pause. slowness: of the machine just now."""
        begun, self._view = self._view, None
        if begun is None:
            return
        ms, num_tokens = 1e3 * (view.now_s - begun.now_s), view.num_generated - begun.num_generated
        if self._num_steps:
            ms = min(ms, MAX_EXCESS * self._ms / self._num_steps)
        self._ms += ms
        self._num_steps += 1
        self.lost += self.rate * ms - num_tokens
        if self._left:
            self._left -= 1
            return
        self.tokens += num_tokens
        self.expected += self.promise * max(0.0, ms - 1e3 * (view.learning_s - begun.learning_s)) / slowness
