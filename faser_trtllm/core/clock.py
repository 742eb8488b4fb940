"""The executor's monotonic clock, which simulations and tests replace."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds."""


class MonotonicClock:
    def now_s(self) -> float:
        return time.perf_counter()


class ManualClock:
    """A clock that moves only when advance() is called."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
