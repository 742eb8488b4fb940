"""A simulated machine with varying speed, like real ones."""

from __future__ import annotations

import random

from faser_trtllm.core.clock import ManualClock

STRETCHES_S = (0.2, 0.5, 1.0, 3.0)  # how long a speed lasts
NOISE = 0.06  # standard deviation of the log of one advance


class ChangingClock(ManualClock):
    """Advances by up to `slowdown` times as much as it is told, for stretches of some seconds, and by noise on top.

    nominal_s() is the time of a machine that is always as fast as at its best, without noise: how fast a policy is
    should be told by that, since no policy can help the machine's speed.
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
