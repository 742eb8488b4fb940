"""Pauses of this process or its machine, which do not count as a stall of the executor."""

from __future__ import annotations

import time

_LATE_PING_S = 2.0  # the backend pings once a second


class Pauses:
    """Infers from late pings how long this process did not run; that time is no stall of the executor."""

    def __init__(self) -> None:
        self._pinged_s = time.monotonic()
        self._paused_s = 0.0  # since the executor last made progress

    def without(self, stalled_s: float) -> float:
        """Return stalled_s, the seconds without progress, less the pauses in them. Must be called on every ping."""
        now_s = time.monotonic()
        since_ping_s, self._pinged_s = now_s - self._pinged_s, now_s
        if stalled_s < since_ping_s:
            self._paused_s = 0.0
        self._paused_s += max(0.0, min(since_ping_s, stalled_s) - _LATE_PING_S)
        return max(0.0, stalled_s - self._paused_s)
