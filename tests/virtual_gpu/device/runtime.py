"""The engine's runtime on the virtual GPU: CudaRuntime's part, over the driver's calls instead of torch.cuda's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from faser_trtllm.engine.gpu.runtime import CudaRuntime, GraphLoop, Replay, Work
from faser_trtllm.ops.cuda.driver import ensure_context, load_driver
from faser_trtllm.partition.green_context import GpuPartition
from tests.virtual_gpu.device.graph_pool import GraphPool
from tests.virtual_gpu.device.memory import install_page_locked
from tests.virtual_gpu.device.streams import Event, Graph, call, current_stream, on_stream
from tests.virtual_gpu.device.tensors import install


class VirtualRuntime:
    """Runtime (engine/gpu/runtime.py)."""

    host_tensor = CudaRuntime.host_tensor
    _torch: Any = torch

    def __init__(self, ordinal: int = 0) -> None:
        ensure_context(load_driver())
        self.device = install()
        install_page_locked()
        self._pool = GraphPool()

    def on(self, partition: GpuPartition) -> AbstractContextManager[Any]:
        return on_stream(partition.stream)

    def wait(self) -> None:
        self.mark()()

    def mark(self) -> Callable[[], None]:
        return Event().record().synchronize

    def capture(self, work: Work) -> Replay:
        return Graph(work, pool=self._pool).replay

    def capture_loop(self, begin: Work, step: Work, going: torch.Tensor) -> Replay:
        capture = functools.partial(Graph, keep_graph=True, pool=self._pool)
        return GraphLoop(self.stream, capture, begin, step, going).launch

    def memory_bytes(self) -> int:
        free, total = call("cuMemGetInfo")
        return int(total - free)

    def free_bytes(self) -> int:
        return int(call("cuMemGetInfo")[0])

    def now(self) -> Event:
        return Event().record()

    def ms_between(self, begin: Event, end: Event) -> float:
        return begin.ms_until(end)

    def stream(self) -> int:
        return current_stream()
