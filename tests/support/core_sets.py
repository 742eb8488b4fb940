"""Shares of the CPU that no user would ask for."""

from __future__ import annotations

from faser_trtllm import native
from faser_trtllm.partition.core_set import CoreSet


class OversubscribedCoreSet(CoreSet):
    """More workers than cores, as on a loaded machine."""

    def __init__(self, num_threads: int) -> None:
        self._handle = native.library().faser_pool_create(None, num_threads, 20)
