"""A simulated machine with varying speed, like real ones."""

from __future__ import annotations

import random

from lab.clock import ManualClock

STRETCHES_S = (0.2, 0.5, 1.0, 3.0)  # durations of a constant speed
NOISE = 0.06  # standard deviation of the log of one advance


class ChangingClock(ManualClock):
    """A clock of a machine that is up to `slowdown` times slower for stretches of some seconds, with noise.

    nominal_s() is the time at the best speed without noise, by which policies are compared.
    """

    def __init__(self, slowdown: float, seed: int = 0) -> None:
        super().__init__()
        self._max_slowdown = slowdown
        self._random = random.Random(seed)
        self._nominal_s = 0.0
        self._slowness = 1.0
        self._until_s = 0.0

    def nominal_s(self) -> float:
        return self._nominal_s

    def advance(self, seconds: float) -> None:
        if self.now_s() >= self._until_s:
            self._until_s = self.now_s() + self._random.choice(STRETCHES_S)
            self._slowness = self._max_slowdown ** self._random.random()
        self._nominal_s += seconds
        super().advance(seconds * self._slowness * self._random.lognormvariate(0.0, NOISE))
