"""Percentiles of any number of values in fixed memory."""

from __future__ import annotations

import math

STEP = 1.01  # a bin ends one percent above its start
LEAST, MOST = 1e-3, 1e8


class Histogram:
    """Bins of 1 %, from LEAST to MOST; what is beyond counts as these."""

    def __init__(self) -> None:
        self._counts = [0] * (math.ceil(math.log(MOST / LEAST) / math.log(STEP)) + 1)
        self._count, self._sum = 0, 0.0

    def __len__(self) -> int:
        return self._count

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self._sum / self._count if self._count else 0.0

    def add(self, value: float) -> None:
        bounded = min(max(value, LEAST), MOST)
        self._counts[round(math.log(bounded / LEAST) / math.log(STEP))] += 1
        self._count += 1
        self._sum += value

    def percentile(self, share: float) -> float:
        """The value below which this share of all lies, within a percent; 0 of nothing."""
        wanted, seen = share * self._count, 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return LEAST * STEP**place
        return 0.0
