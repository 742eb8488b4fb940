"""A clock for simulations and tests."""

from __future__ import annotations


class ManualClock:
    """A clock that moves only when advance() is called."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
