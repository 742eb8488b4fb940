"""Statistics of interleaved rounds: medians and paired ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Median and range of a sample."""

    median: float
    low: float
    high: float

    def words(self, digits: int = 2) -> str:
        """Return a text such as "1.02, 0.98 to 1.05", or "1.02" if the range is a point."""
        median, low, high = (f"{value:.{digits}f}" for value in (self.median, self.low, self.high))
        return median if self.low == self.high else f"{median}, {low} to {high}"


def summarize(values: Sequence[float]) -> Summary:
    return Summary(statistics.median(values), min(values), max(values))


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Summary:
    """Return ratios per round, in which the machine's speed cancels."""
    if len(values) != len(baseline):
        raise ValueError(f"{len(values)} rounds against {len(baseline)}, ratios need the same rounds")
    return summarize([value / base for value, base in zip(values, baseline, strict=True)])
