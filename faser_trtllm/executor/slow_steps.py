"""The duration of an executor's slowest steps, so that a slow model is not mistaken for a hang."""

from __future__ import annotations

from faser_trtllm.executor.stats import Histogram

_BOUNDS_S = tuple(2.0**exponent for exponent in range(-10, 10))
_SHARE = 0.001
_MIN_STEPS = 2  # a hang that ended counts as one slow step


class SlowSteps:
    """Tracks step durations. Written only by the executor's thread, readable from any."""

    def __init__(self) -> None:
        self._histogram = Histogram(_BOUNDS_S)
        self._num_steps = 0

    def observe(self, step_s: float) -> None:
        self._histogram.observe(step_s)
        self._num_steps += 1

    @property
    def slow_s(self) -> float:
        """Duration in s of the slowest 0.1 % of steps (at least two), within a factor of two; 0 at first."""
        wanted = max(_MIN_STEPS, _SHARE * self._num_steps)
        counts, sums = self._histogram.counts, self._histogram.sums
        num_slower = 0
        for count, total_s in zip(reversed(counts), reversed(sums), strict=True):
            num_slower += count
            if num_slower >= wanted:
                return total_s / count
        return 0.0
