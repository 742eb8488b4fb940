"""The GPU that engines are opened on: its partitions, its memory and our kernels compiled for it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Protocol

from faser_trtllm.config import Quantization
from faser_trtllm.core.closing import Closing
from faser_trtllm.errors import ConfigError
from faser_trtllm.partition.green_context import GpuPartition, GpuPartitions, PartitionPair

if TYPE_CHECKING:
    import torch

    from faser_trtllm.engine.gpu.ops import Ops
    from faser_trtllm.engine.gpu.runtime import Runtime


class Gpu(Protocol):
    """The GPU that engines are opened on."""

    whole: GpuPartition  # for serial mode
    pair: PartitionPair  # for modes that overlap
    compute_capability: str  # like "9.0"
    weights_dtype: torch.dtype | None  # replaces the engine file's, in tests
    collectives: str  # torch.distributed's backend between ranks

    def of_rank(self, rank: int) -> tuple[Callable[[], AbstractContextManager[Gpu]], Mapping[str, str]]:
        """Return a picklable function that makes another rank's GPU in that rank's process, and the environment
        variables it needs; raise ConfigError if there is no such GPU."""

    def make_runtime(self) -> Runtime:
        """Make a runtime, one per engine."""

    def check_quantization(self, runtime: Runtime, quantization: Quantization) -> None:
        """Raise ConfigError if the GPU does not support this quantization."""

    def free_bytes(self) -> int:
        """Return the bytes of free device memory."""

    def make_ops(
        self, runtime: Runtime, head_dim: int | None, deterministic: bool = False, has_mxfp4: bool = False
    ) -> Ops:
        """Make the ops for attention heads of this size; None: without attention. deterministic: see Ops. has_mxfp4:
        for experts in MXFP4."""


class CudaGpu(Closing):
    """A GPU, its partitions and the kernels compiled for it. Use a `with` block.

    draft_sms: sizes of the draft's partition in SMs, of which the first is used; None: default_draft_sms().
    plain_streams: instead of green contexts, draft and target each have a stream with every SM. Raises ConfigError if
    torch's CUDA, cuda-python, a driver or nvcc is missing or too old.
    """

    weights_dtype: torch.dtype | None = None
    collectives = "nccl"

    def __init__(
        self, ordinal: int = 0, draft_sms: Sequence[int] | None = None, *, plain_streams: bool = False
    ) -> None:
        from faser_trtllm.builder.plan_file import arch_capability
        from faser_trtllm.engine.gpu.runtime import CudaRuntime
        from faser_trtllm.ops.cuda.compiler import check_driver
        from faser_trtllm.ops.cuda.driver import device_arch, driver_version

        self._ordinal, self._plain_streams = ordinal, plain_streams
        CudaRuntime(ordinal)  # raises if something is missing, and creates the context that green contexts need
        check_driver(driver_version())
        self.compute_capability = arch_capability(device_arch(ordinal))
        self._stack = ExitStack()
        self.partitions = GpuPartitions(draft_sms or None, ordinal, plain_streams=plain_streams)
        self._stack.callback(self.partitions.close)
        self.whole, self.pair = self.partitions.whole, self.partitions.pairs[0]

    def make_runtime(self) -> Runtime:
        from faser_trtllm.engine.gpu.runtime import CudaRuntime

        return CudaRuntime(self._ordinal)

    def of_rank(self, rank: int) -> tuple[Callable[[], AbstractContextManager[Gpu]], Mapping[str, str]]:
        """See Gpu.of_rank. A rank's process sees one of the GPUs that this process sees."""
        from faser_trtllm.ops.cuda.driver import num_devices

        count = num_devices()
        if rank >= count:
            raise ConfigError(
                f"rank {rank} needs a GPU of its own, and this machine has {count}; build with a --tp_size of at most "
                f"{count}, or use a machine with more"
            )
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        make = functools.partial(CudaGpu, plain_streams=self._plain_streams)
        return make, {"CUDA_VISIBLE_DEVICES": seen.split(",")[rank].strip()}

    def check_quantization(self, runtime: Runtime, quantization: Quantization) -> None:
        from faser_trtllm.engine.gpu.fp8 import check_capability, check_product
        from faser_trtllm.ops.cuda.driver import device_name

        if quantization is Quantization.FP8:
            major, minor = map(int, self.compute_capability.split("."))
            check_capability((major, minor), device_name(self._ordinal))
            check_product(runtime.device)

    def free_bytes(self) -> int:
        from faser_trtllm.ops.cuda.driver import free_bytes

        return free_bytes()

    def make_ops(
        self, runtime: Runtime, head_dim: int | None, deterministic: bool = False, has_mxfp4: bool = False
    ) -> Ops:
        from faser_trtllm.engine.gpu.ops import GROUPED_MM_MAJORS, STEMS, Ops
        from faser_trtllm.ops.cuda.compiler import compile_stem
        from faser_trtllm.ops.cuda.driver import Module, StreamLauncher, device_arch

        arch = device_arch(self._ordinal)
        has_grouped_mm = int(self.compute_capability.split(".")[0]) in GROUPED_MM_MAJORS
        unused = {
            "verify_attention": head_dim is None,
            "matmul": not deterministic,
            "grouped_matmul": has_grouped_mm and not deterministic and not has_mxfp4,
        }
        launchers: dict[str, StreamLauncher] = {}
        for stem in STEMS:
            if unused.get(stem):
                continue
            defines = {"FASER_HEAD_DIM": head_dim} if stem == "verify_attention" and head_dim is not None else None
            launchers[stem] = self._stack.enter_context(Module(compile_stem(stem, arch, defines=defines).path))
        return Ops(launchers, runtime.stream, self.whole.num_sms, deterministic)

    def close(self) -> None:
        """Unload the kernels and release the partitions; close engines before."""
        self._stack.close()
