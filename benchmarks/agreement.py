"""Agreement of outputs with a reference."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


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
    """Return the number of tokens before the first difference."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


def first_difference(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Return (sequence, position) of the first difference, or None if all are identical."""
    for i, (output, wanted) in enumerate(zip(outputs, reference, strict=True)):
        if list(output) != list(wanted):
            return i, common_prefix(output, wanted)
    return None
