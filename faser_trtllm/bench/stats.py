"""Statistics of interleaved rounds: medians and paired ratios."""

from __future__ import annotations

import math
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
        """Such as "1.02, 0.98 to 1.05", or "1.02" where the range is a point."""
        median, low, high = (f"{value:.{digits}f}" for value in (self.median, self.low, self.high))
        return median if self.low == self.high else f"{median}, {low} to {high}"


def summarize(values: Sequence[float]) -> Summary:
    return Summary(statistics.median(values), min(values), max(values))


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Summary:
    """Ratios per round: whatever slows the machine in a round slows both sides and cancels."""
    if len(values) != len(baseline):
        raise ValueError(f"{len(values)} rounds against {len(baseline)}, ratios need the same rounds")
    return summarize([value / base for value, base in zip(values, baseline, strict=True)])


@dataclass(frozen=True)
class MeanRatio:
    """The geometric mean of ratios and its relative standard error (nan for fewer than two ratios)."""

    mean: float
    error: float


def ratio_to_best(values: Sequence[float], rivals: Sequence[Sequence[float]]) -> MeanRatio:
    """Ratios per round against the rival that is best in the other rounds.

    Picking the best rival in the round that is compared would favour a lucky one; picking it by the other rounds does
    not. Needs at least two rounds.
    """
    num_rounds = min(len(values), *(len(rival) for rival in rivals))
    if num_rounds < 2:
        raise ValueError(f"{num_rounds} rounds, 2 are needed to pick a rival by the others")
    logs = [[math.log(rate) for rate in rival[:num_rounds]] for rival in rivals]
    ratios = []
    for number, value in enumerate(values[:num_rounds]):
        best = max(logs, key=lambda rival: sum(rival) - rival[number])
        ratios.append(math.log(value) - best[number])
    error = statistics.stdev(ratios) / math.sqrt(num_rounds)
    return MeanRatio(math.exp(statistics.fmean(ratios)), error)


@dataclass(frozen=True)
class Agreement:
    """Agreement of outputs with a reference: identical sequences, and the mean share before the first difference."""

    num_identical: int
    num_sequences: int
    prefix_share: float


def agreement(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> Agreement:
    if len(outputs) != len(reference):
        raise ValueError(f"{len(outputs)} sequences against {len(reference)}")
    shares = [
        common_prefix(output, wanted) / max(len(output), len(wanted), 1)
        for output, wanted in zip(outputs, reference, strict=True)
    ]
    return Agreement(sum(share == 1.0 for share in shares), len(shares), statistics.fmean(shares))


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of tokens before the first difference."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


def first_difference(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """(sequence, position) of the first difference, or None if all are identical."""
    for i, (output, wanted) in enumerate(zip(outputs, reference, strict=True)):
        if list(output) != list(wanted):
            return i, common_prefix(output, wanted)
    return None
