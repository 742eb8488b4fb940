"""Memory by address: allocations of the host, and a block's shared and local memory in windows of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ops.cuda.ptx.interpreter.program import PtxError

Array = np.ndarray

# Generic addresses. The host has none up there, and an offset of a pointer in one window leads to no other.
SHARED_WINDOW = 1 << 62
LOCAL_WINDOW = 1 << 61
BORDER = 64  # bytes between variables, which nobody may touch
WIDEST = 16


class Stretch:
    """Bytes at [start, end) of one state space; `buffer` begins at a multiple of 16 at or before start."""

    def __init__(self, space: str, start: int, end: int, buffer: Array, owner: Any = None) -> None:
        self.space, self.start, self.end, self.owner = space, start, end, owner
        self._base = start - start % WIDEST
        self._views = {width: buffer.view(f"u{width}") for width in (1, 2, 4, 8)}

    def at(self, addresses: Array, width: int, count: int) -> tuple[Array, Array]:
        """Rows of `count` entries of `width` bytes, and which of them are meant; addresses are aligned."""
        rows = self._views[width].reshape(-1, count)
        return rows, (addresses - np.uint64(self._base)) // np.uint64(width * count)


class Memory:
    """Global memory is what was added; a block's own memory comes and goes with it."""

    def __init__(self) -> None:
        self._stretches: list[Stretch] = []

    def add_host(self, address: int, size: int, owner: Any) -> None:
        """Bytes of the host, as global memory; owner keeps them alive."""
        if size == 0 or any((known.start, known.end) == (address, address + size) for known in self._stretches):
            return
        base = address - address % WIDEST
        padded = -(-(address + size - base) // WIDEST) * WIDEST
        buffer = np.frombuffer((ctypes.c_uint8 * padded).from_address(base), np.uint8)
        self._stretches.append(Stretch("global", address, address + size, buffer, owner))

    def add_array(self, array: Array) -> None:
        """A numpy array that a pointer in memory leads to."""
        self.add_host(array.ctypes.data, array.nbytes, array)

    def with_block(self, variables: list[tuple[str, int, int]]) -> Memory:
        """This memory and variables of a block, (space, generic address, bytes), full of NaNs."""
        made = Memory()
        for space, address, size in variables:
            buffer = np.full(-(-(address % WIDEST + size) // WIDEST) * WIDEST, 0xFF, np.uint8)
            made._stretches.append(Stretch(space, address, address + size, buffer))
        made._stretches += self._stretches
        return made

    def load(self, addresses: Array, width: int, count: int, space: str, threads: Array) -> Array:
        """[addresses, count] entries of `width` bytes."""
        found = np.empty((len(addresses), count), f"u{width}")

        def take(rows: Array, at: Array, chosen: Any) -> None:
            found[chosen] = rows[at]

        self._each(addresses, width, count, space, threads, take)
        return found

    def store(self, addresses: Array, values: Array, space: str, threads: Array) -> None:
        """values [addresses, count], of unsigned integers."""

        def put(rows: Array, at: Array, chosen: Any) -> None:
            rows[at] = values[chosen]

        self._each(addresses, values.dtype.itemsize, values.shape[1], space, threads, put)

    def _each(
        self,
        addresses: Array,
        width: int,
        count: int,
        space: str,
        threads: Array,
        use: Callable[[Array, Array, Any], None],
    ) -> None:
        size = width * count
        _refuse(addresses & np.uint64(size - 1) != 0, addresses, threads, f"is not aligned to {size} bytes")
        low, high = int(addresses.min()), int(addresses.max())
        for stretch in self._stretches:
            if stretch.start <= low and high + size <= stretch.end and space in ("generic", stretch.space):
                use(*stretch.at(addresses, width, count), slice(None))
                return
        left = np.ones(len(addresses), bool)
        for stretch in self._stretches:
            if space not in ("generic", stretch.space):
                continue
            chosen = left & (addresses >= np.uint64(stretch.start)) & (addresses + np.uint64(size) <= stretch.end)
            if chosen.any():
                use(*stretch.at(addresses[chosen], width, count), chosen)
                left &= ~chosen
        _refuse(left, addresses, threads, f"and the {size} bytes there are not in {space} memory")


def _refuse(bad: Array, addresses: Array, threads: Array, why: str) -> None:
    if bad.any():
        first = int(bad.argmax())
        raise PtxError(f"address {addresses[first]:#x} of thread {threads[first]} {why}")
