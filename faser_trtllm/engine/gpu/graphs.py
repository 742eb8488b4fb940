"""Captured graphs by key, created at start-up within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from faser_trtllm.engine.gpu.runtime import Replay, Runtime

DEFAULT_GRAPH_BYTES = 2 << 30


class GraphStore:
    """Graphs of one engine. budget_bytes: capturing stops once the graphs take this much device memory.

    least_of_ranks: of a number, where engines on several GPUs must capture the same graphs.
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
        self.num_bytes = 0
        self.num_left_out = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, work: Callable[[], None]) -> bool:
        """Run `work` once on the current stream, then capture it under `key`; False if the budget is spent.

        `work` may depend only on the contents of device memory at replay.
        """
        if self._least_of_ranks(self._budget_bytes - self.num_bytes) <= 0:
            self.num_left_out += 1
            return False
        before = self._runtime.memory_bytes()
        work()  # libraries choose algorithms and allocate workspaces in the first run, which cannot be captured
        self._runtime.wait()
        self._graphs[key] = self._runtime.capture(work)
        self._runtime.wait()
        self.num_bytes += max(0, self._runtime.memory_bytes() - before)
        return True

    def replay(self, key: Hashable) -> bool:
        """Launch the graph of `key` on the current stream; False if there is none."""
        graph = self._graphs.get(key)
        if graph is None:
            return False
        graph()
        return True

    def clear(self) -> None:
        """Free all graphs; none may be running."""
        self._graphs.clear()
