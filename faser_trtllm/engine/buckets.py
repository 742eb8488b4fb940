"""Bucket sizes that passes are padded to, so that few shapes are compiled, captured and warmed up."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass

MAX_GRAPH_ROWS = 512
"""A graph of up to this many rows computes the logits of all of them. Larger passes are mostly prompts and need few."""

_SMALLEST = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224)
_STEP = 64  # up to 1024 rows; above that, steps are 1/16 to 1/8 of the size


@dataclass(frozen=True, slots=True)
class Buckets:
    """Row counts that passes are padded to: sizes() up to `limit`, large_sizes() up to `largest`; none above that.

    is_coarse: large sizes are the limit times powers of two, for decoders that need memory for each size.
    """

    limit: int
    largest: int = 0
    is_coarse: bool = False

    def sizes(self) -> tuple[int, ...]:
        return _sizes(self.limit)

    def large_sizes(self) -> tuple[int, ...]:
        return _large_sizes(self.limit, self.largest, self.is_coarse)

    def rows(self, num_rows: int) -> int:
        """Return the bucket for this many rows."""
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
    """Yield the sizes below `largest`, ascending."""
    yield from (size for size in _SMALLEST if size < largest)
    size = 4 * _STEP
    while size < largest:
        yield size
        size += max(_STEP, 1 << size.bit_length() - 4)
