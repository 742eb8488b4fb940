"""Ratios to the best rival, without favoring a lucky one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MeanRatio:
    """The geometric mean of ratios and its relative standard error (nan for fewer than two ratios)."""

    mean: float
    error: float


def ratio_to_best(values: Sequence[float], rivals: Sequence[Sequence[float]]) -> MeanRatio:
    """Return ratios per round against the rival that is best in the other rounds; needs at least two rounds.

    Choosing the best rival of the compared round would favor a lucky one.
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
