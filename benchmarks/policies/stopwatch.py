"""A clock that can be stopped, so that systems can take turns on one machine."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """A Clock (core/clock.py) that can be stopped, and is at first."""

    def __init__(self, source: Callable[[], float] = time.perf_counter) -> None:
        self._source = source
        self._elapsed_s = 0.0
        self._started_s: float | None = None

    def now_s(self) -> float:
        return self._elapsed_s if self._started_s is None else self._elapsed_s + self._source() - self._started_s

    def start(self) -> None:
        if self._started_s is None:
            self._started_s = self._source()

    def stop(self) -> None:
        self._elapsed_s, self._started_s = self.now_s(), None
