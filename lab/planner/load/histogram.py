"""Percentiles of any number of values, in fixed memory."""

from __future__ import annotations

import math

STEP = 1.01  # ratio of a bin's end to its start
LEAST, MOST = 1e-3, 1e8


class Histogram:
    """A histogram with bins of 1 % from LEAST to MOST; values beyond are clipped."""

    def __init__(self) -> None:
        self._counts = [0] * (math.ceil(math.log(MOST / LEAST) / math.log(STEP)) + 1)
        self._count, self._sum = 0, 0.0

    def __len__(self) -> int:
        return self._count

    @property
    def mean(self) -> float:
        """The mean, 0 without values."""
        return self._sum / self._count if self._count else 0.0

    def add(self, value: float) -> None:
        bounded = min(max(value, LEAST), MOST)
        self._counts[round(math.log(bounded / LEAST) / math.log(STEP))] += 1
        self._count += 1
        self._sum += value

    def percentile(self, share: float) -> float:
        """Return the value below which this share of all lies, within a percent; 0 without values."""
        wanted, seen = share * self._count, 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return LEAST * STEP**place
        return 0.0
