"""Memory that graphs of the virtual GPU share, as torch.cuda.graph_pool_handle() has it."""

from __future__ import annotations

import contextlib
from collections import defaultdict

from tests.virtual_gpu.device.frees import free_or_wait
from tests.virtual_gpu.device.streams import call, current_stream

_NEW_BYTE = 0xFF  # as in driver/memory.cpp
_ROUNDED = 512  # bytes, as torch rounds


class GraphPool:
    """Memory of captured graphs. What is freed during capture serves later captures on the same stream: the smallest
    part that is large enough is cut, and parts that touch are merged. All of it is freed with the last graph.

    Parts have no borders, since each graph cuts others; what is captured has run outside a graph before, with borders.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, dict[int, int]] = defaultdict(dict)  # bytes by address, by stream
        self._given_back: list[tuple[int, int, int]] = []
        self._taken: set[int] = set()
        self._segments: list[int] = []

    def __contains__(self, address: int) -> bool:
        """Return whether a part that somebody holds begins at the address."""
        return address in self._taken

    def take(self, num_bytes: int) -> PoolBlock:
        """Poisoned memory whenever the graph gets here."""
        self._merge()
        stream, size = current_stream(), -(-num_bytes // _ROUNDED) * _ROUNDED
        free = self._free[stream]
        fitting = [(found, address) for address, found in free.items() if found >= size]
        if fitting:
            found, address = min(fitting)
            del free[address]
            if found > size:
                free[address + size] = found - size
        else:
            address = int(call("cuMemAllocAsync", size, 0))
            self._segments.append(address)
        self._taken.add(address)
        block = PoolBlock(self, stream, address, size)
        call("cuMemsetD8Async", address, _NEW_BYTE, size, stream)
        return block

    def give_back(self, stream: int, address: int, size: int) -> None:
        """At any time: the garbage collector calls it."""
        self._given_back.append((stream, address, size))

    def _merge(self) -> None:
        while self._given_back:
            stream, address, size = self._given_back.pop()
            self._taken.discard(address)
            free = self._free[stream]
            for start, found in list(free.items()):
                if start + found == address or address + size == start:
                    del free[start]
                    address, size = min(address, start), size + found
            free[address] = size

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            for address in self._segments:
                free_or_wait("cuMemFree", address)


class PoolBlock:
    """A part of a pool, until nobody holds it."""

    def __init__(self, pool: GraphPool, stream: int, address: int, size: int) -> None:
        self.pool, self.address = pool, address
        self._part = stream, address, size

    def __del__(self) -> None:
        self.pool.give_back(*self._part)
