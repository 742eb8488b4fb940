"""Bucket sizes: passes are rounded up to them, so that few shapes are compiled, captured and first run at start-up."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass

MAX_GRAPH_ROWS = 512
"""Most rows of a pass whose graph makes the logits of all of them: larger ones are mostly prompts, which need few."""

_SMALLEST = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224)
_STEP = 64  # up to 1024 rows; from there on a sixteenth to an eighth of a pass


@dataclass(frozen=True, slots=True)
class Buckets:
    """Row counts of passes: sizes() up to `limit`, large_sizes() beyond it up to `largest`; what is larger runs as it
    is.

    is_coarse: large sizes are the limit times powers of two, where each takes memory of its own.
    """

    limit: int
    largest: int = 0
    is_coarse: bool = False

    def sizes(self) -> tuple[int, ...]:
        return _sizes(self.limit)

    def large_sizes(self) -> tuple[int, ...]:
        return _large_sizes(self.limit, self.largest, self.is_coarse)

    def rows(self, num_rows: int) -> int:
        """The bucket for a number of rows, which is at least 1."""
        if num_rows > max(self.limit, self.largest):
            return num_rows
        sizes = self.sizes() if num_rows <= self.limit else self.large_sizes()
        return sizes[bisect.bisect_left(sizes, max(num_rows, 1))]


@functools.cache
def _sizes(limit: int) -> tuple[int, ...]:
    return (*_below(limit), limit)


@functools.cache
def _large_sizes(limit: int, largest: int, is_coarse: bool) -> tuple[int, ...]:
    if largest <= limit:
        return ()
    doublings = (limit << n for n in range(1, (largest // limit).bit_length()))
    sizes = doublings if is_coarse else _below(largest)
    return (*(size for size in sizes if limit < size < largest), largest)


def _below(largest: int) -> Iterator[int]:
    """Smaller sizes, ascending."""
    yield from (size for size in _SMALLEST if size < largest)
    size = 4 * _STEP
    while size < largest:
        yield size
        size += max(_STEP, 1 << size.bit_length() - 4)
