"""Sizes that passes are rounded up to, so that few shapes are compiled and captured."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

_FINE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)
_COARSE = 32


@dataclass(frozen=True, slots=True)
class Buckets:
    """Numbers of rows that graphs are captured for, up to `limit` rows; larger passes run as they are, without a graph.

    limit: the rows of the engine's smallest profile.
    """

    limit: int

    def sizes(self) -> tuple[int, ...]:
        coarse = range(128, self.limit, _COARSE)
        return (*(size for size in (*_FINE, *coarse) if size < self.limit), self.limit)

    def rows(self, num_rows: int) -> int:
        """The size for a number of rows of at least 1."""
        if num_rows > self.limit:
            return num_rows
        sizes = self.sizes()
        return sizes[bisect.bisect_left(sizes, max(num_rows, 1))]

    def query_rows(self, num_rows: int, rows: int) -> int:
        """The size for the rows of one request in a pass of `rows` rows: a power of two, at most `rows`."""
        return min(1 << (max(num_rows, 1) - 1).bit_length(), rows)

    def has_graph(self, rows: int) -> bool:
        return rows <= self.limit
