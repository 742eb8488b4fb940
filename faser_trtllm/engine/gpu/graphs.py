"""Captured graphs by key, created at start-up within a memory budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from faser_trtllm.engine.gpu.runtime import Replay, Runtime, Work
from faser_trtllm.errors import FaserError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

DEFAULT_GRAPH_BYTES = 2 << 30


class GraphStore:
    """The graphs of one engine.

    budget_bytes: capturing stops once the graphs take this much device memory, or half of what was free before the
    first one. least_of_ranks: returns the minimum of a number over all ranks, so that all ranks capture the same
    graphs.
    """

    def __init__(
        self,
        runtime: Runtime,
        budget_bytes: int = DEFAULT_GRAPH_BYTES,
        least_of_ranks: Callable[[int], int] = lambda number: number,
    ) -> None:
        self._runtime = runtime
        self._budget_bytes = budget_bytes
        self._least_of_ranks = least_of_ranks
        self._graphs: dict[Hashable, Replay] = {}
        self._max_bytes: int | None = None
        self._refuses_loops = False
        self.num_bytes = 0
        self.num_left_out = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, work: Work) -> bool:
        """Run `work` once on the current stream, then capture it under `key`; return False if the budget is spent.

        `work` may only depend on the contents of device memory at replay.
        """
        if not self._has_budget():
            work()  # so that serving without a graph runs no kernel for the first time
            self._runtime.wait()
            self.num_left_out += 1
            return False
        self._keep(key, (work,), lambda: self._runtime.capture(work))
        return True

    def capture_loop(self, key: Hashable, begin: Work, step: Work, going: Tensor) -> bool:
        """Run `begin` and `step` once, then capture them, with `step` repeated while `going` on the device is not 0.
        Return False, without counting it, if the budget is spent or the driver refuses loops, which is logged once."""
        if self._refuses_loops or not self._has_budget():
            return False
        try:
            self._keep(key, (begin, step), lambda: self._runtime.capture_loop(begin, step, going))
        except (FaserError, RuntimeError) as error:
            self._refuses_loops = True
            log.warning(
                "loops in CUDA graphs cannot be made (%s): with a stop rule the host reads one number after each draft "
                "step",
                error,
            )
            return False
        return True

    def replay(self, key: Hashable) -> bool:
        """Launch the graph captured under `key` on the current stream; return False if there is none."""
        graph = self._graphs.get(key)
        if graph is None:
            return False
        graph()
        return True

    def clear(self) -> None:
        """Free all graphs; none may be running."""
        self._graphs.clear()

    def _has_budget(self) -> bool:
        if self._max_bytes is None:
            self._max_bytes = min(self._budget_bytes, self._runtime.free_bytes() // 2)
        return self._least_of_ranks(self._max_bytes - self.num_bytes) > 0

    def _keep(self, key: Hashable, works: tuple[Work, ...], capture: Callable[[], Replay]) -> None:
        before = self._runtime.memory_bytes()
        for work in works:
            work()  # in their first run, libraries choose algorithms and allocate workspaces, which cannot be captured
        self._runtime.wait()
        self._graphs[key] = capture()
        self._runtime.wait()
        self.num_bytes += max(0, self._runtime.memory_bytes() - before)
