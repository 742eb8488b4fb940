"""The GPU of a dry run: the CPU, synchronously."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.config import Quantization
from faser_trtllm.engine.gpu.device import Gpu
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.runtime import Replay, Runtime, Work
from faser_trtllm.errors import ConfigError
from faser_trtllm.partition.green_context import GpuPartition, PartitionPair

if TYPE_CHECKING:
    import torch


class HostRuntime:
    """A runtime on the CPU without concurrency: partitions are only names, and a graph is the function itself."""

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cpu")
        self._stream = 0

    @contextlib.contextmanager
    def on(self, partition: GpuPartition) -> Iterator[None]:
        before, self._stream = self._stream, partition.stream
        try:
            yield
        finally:
            self._stream = before

    def stream(self) -> int:
        return self._stream

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(shape, dtype=dtype)

    def wait(self) -> None:
        return

    def mark(self) -> Callable[[], None]:
        return self.wait

    def capture(self, work: Work) -> Replay:
        return work

    def capture_loop(self, begin: Work, step: Work, going: torch.Tensor) -> Replay:
        def run() -> None:
            begin()
            while int(going):
                step()

        return run

    def memory_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return 1 << 62

    def now(self) -> Any:
        return time.perf_counter()

    def ms_between(self, begin: Any, end: Any) -> float:
        return 1e3 * float(end - begin)


class DryGpu:
    """A Gpu whose partitions are only names and whose kernels are the references."""

    whole: GpuPartition = GpuPartition("whole", 0, 4)
    pair: PartitionPair = PartitionPair(GpuPartition("draft 1:3", 0, 1), GpuPartition("target 1:3", 0, 3))
    compute_capability: str = "9.0"
    weights_dtype: torch.dtype | None = None
    collectives: str = "gloo"

    def make_runtime(self) -> Runtime:
        return HostRuntime()

    def of_rank(self, rank: int) -> tuple[Callable[[], AbstractContextManager[Gpu]], Mapping[str, str]]:
        raise ConfigError(f"rank {rank} needs a GPU of its own, and a dry run has none; build with --tp_size 1")

    def check_quantization(self, runtime: Runtime, quantization: Quantization) -> None:
        """Accept any quantization; the CPU multiplies in fp8, too."""

    def free_bytes(self) -> int:
        return 1 << 40

    def make_ops(
        self, runtime: Runtime, head_dim: int | None, deterministic: bool = False, has_mxfp4: bool = False
    ) -> Ops:
        return ReferenceOps()
