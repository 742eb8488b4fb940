"""A share of the CPU: the cores that an engine's native threads run on."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.closing import Closing
from faser_trtllm.errors import ConfigError, FaserError

# Long enough to bridge the Python code between two passes, short enough not to keep a core busy.
DEFAULT_SPIN_US = 200


class CoreSet(Closing):
    """Owns one native thread pool. The thread that calls an engine is worker 0; the other workers are in the pool.

    cores: core ids of this partition; workers 1 and up are pinned to cores[1:]. None: all cores of the process, not
    pinned. num_threads: workers, at most one per core; default: all. Engines that take turns may share a core set.
    """

    def __init__(
        self,
        cores: Sequence[int] | None = None,
        num_threads: int | None = None,
        *,
        spin_us: int = DEFAULT_SPIN_US,
    ) -> None:
        self._handle: int | None = None
        allowed = _allowed_cores()
        self.cores: tuple[int, ...] = tuple(cores) if cores is not None else allowed
        if not self.cores or len(set(self.cores)) < len(self.cores):
            raise ConfigError(f"cores is {list(self.cores)}; it must name at least one core and none twice")
        foreign = [core for core in self.cores if core not in allowed]
        if foreign:
            raise ConfigError(f"cores holds {foreign[0]}, this process may use {list(allowed)}")
        self.num_threads: int = len(self.cores) if num_threads is None else num_threads
        if not 1 <= self.num_threads <= len(self.cores):
            raise ConfigError(
                f"num_threads is {self.num_threads}, allowed is 1 to {len(self.cores)}, one per core; "
                "lower it or give the service more cores"
            )
        pinned = np.asarray(self.cores, np.int32) if cores is not None else None
        address = None if pinned is None else pinned.ctypes.data
        self._handle = native.library().faser_pool_create(address, self.num_threads, spin_us)
        if self._handle is None:
            raise FaserError(f"{self.num_threads} native threads could not be started, lower num_threads")

    @property
    def handle(self) -> int:
        """The faser_pool for native calls; raises ValueError after close()."""
        if self._handle is None:
            raise ValueError("the core set is closed")
        return self._handle

    def pin_caller(self) -> None:
        """Pin the calling thread, worker 0, to the first core, so that it does not run on another worker's core."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {self.cores[0]})

    def close(self) -> None:
        """Stop the threads. Close the engines that use them first."""
        handle, self._handle = self._handle, None  # first, since a signal may interrupt, and __del__ closes again
        if handle is not None:
            native.library().faser_pool_destroy(handle)

    def __del__(self) -> None:
        self.close()


def _allowed_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))
