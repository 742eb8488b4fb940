"""Bucket sizes: passes are rounded up to them, so that few shapes are compiled and captured."""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass

MAX_GRAPH_ROWS = 512
"""Of passes with a graph: in larger ones the GPU takes longer than the host needs to launch them kernel by kernel."""

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224)
_COARSE = range(256, MAX_GRAPH_ROWS, 64)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Row counts that graphs are captured for, up to `limit`.

    largest: larger passes are padded too, to the limit times a power of two, at most to this; 0: they run as they are.
    """

    limit: int
    largest: int = 0

    def sizes(self) -> tuple[int, ...]:
        """Of passes with a graph."""
        return _sizes(self.limit)

    def large_sizes(self) -> tuple[int, ...]:
        """Of padded passes without a graph."""
        return _large_sizes(self.limit, self.largest)

    def rows(self, num_rows: int) -> int:
        """The bucket for a number of rows, which is at least 1."""
        sizes = self.sizes() if num_rows <= self.limit else self.large_sizes()
        return sizes[bisect.bisect_left(sizes, max(num_rows, 1))] if sizes else num_rows


@functools.cache
def _sizes(limit: int) -> tuple[int, ...]:
    return (*(size for size in (*_SIZES, *_COARSE) if size < limit), limit)


@functools.cache
def _large_sizes(limit: int, largest: int) -> tuple[int, ...]:
    if largest <= limit:
        return ()
    doublings = range(1, (largest // limit).bit_length())
    return (*(limit << n for n in doublings if limit << n < largest), largest)
