"""The executor's monotonic clock, which simulations and tests replace."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Return monotonic seconds."""


class MonotonicClock:
    def now_s(self) -> float:
        return time.perf_counter()
