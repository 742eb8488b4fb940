"""The GPU of a dry run: the CPU, synchronously."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from faser_trtllm.config import Quantization
from faser_trtllm.engine.gpu.device import Gpu
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.engine.gpu.reference_ops import ReferenceOps
from faser_trtllm.engine.gpu.runtime import HostRuntime, Runtime
from faser_trtllm.errors import ConfigError
from faser_trtllm.partition.green_context import GpuPartition, PartitionPair

if TYPE_CHECKING:
    import torch


class DryGpu:
    """Gpu (faser_trtllm/engine/gpu/device.py): partitions are just names, kernels are the references."""

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
        """The host multiplies in fp8 too."""

    def free_bytes(self) -> int:
        return 1 << 40

    def make_ops(self, runtime: Runtime, head_dim: int | None) -> Ops:
        return ReferenceOps()
