"""Opens the engines of a cuda engine directory: partitions of the GPU, graphs, and the free test on the device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.config import Quantization
from faser_trtllm.core.decision import Mode
from faser_trtllm.executor.partitions_gpu import GpuModes
from faser_trtllm.partition.green_context import GpuPartition, GpuPartitions, PartitionPair

if TYPE_CHECKING:
    from faser_trtllm.builder.cuda_engine_file import CudaFile
    from faser_trtllm.engine.cuda import CudaEngine
    from faser_trtllm.engine.cuda_accept import DeviceAcceptor
    from faser_trtllm.engine.cuda_draft import DraftLaws
    from faser_trtllm.engine.cuda_ops import Ops
    from faser_trtllm.engine.cuda_runtime import Runtime
    from faser_trtllm.engine.cuda_weights import DeviceWeights

log = logging.getLogger(__name__)


class Gpu(Protocol):
    """What engines are opened on. pair: for the modes that overlap; whole: for the serial one."""

    whole: GpuPartition
    pair: PartitionPair

    def make_runtime(self) -> Runtime:
        """One per engine."""

    def load_weights(self, file: CudaFile, runtime: Runtime, quantization: Quantization) -> DeviceWeights:
        """ConfigError where the GPU cannot multiply what quantization asks for."""

    def free_bytes(self) -> int:
        """Device memory that nobody holds."""

    def make_ops(self, runtime: Runtime, head_dim: int) -> Ops: ...


class CudaGpu:
    """A GPU, its partitions and the kernels compiled for it. Not run on a GPU yet.

    draft_sms: SMs for the draft's side, in order of preference; the first pair is the one used. Use a `with` block.
    Raises ConfigError in one sentence where torch's CUDA, cuda-python, a driver or nvcc is missing.
    """

    def __init__(self, ordinal: int = 0, draft_sms: Sequence[int] | None = None) -> None:
        from faser_trtllm.engine.cuda_runtime import CudaRuntime

        self._ordinal = ordinal
        CudaRuntime(ordinal)  # says what is missing, and makes the context that green ones stand on
        self.partitions = GpuPartitions(draft_sms or None, ordinal)
        self.whole, self.pair = self.partitions.whole, self.partitions.pairs[0]
        self._modules = ExitStack()

    def make_runtime(self) -> Runtime:
        from faser_trtllm.engine.cuda_runtime import CudaRuntime

        return CudaRuntime(self._ordinal)

    def load_weights(self, file: CudaFile, runtime: Runtime, quantization: Quantization) -> DeviceWeights:
        import torch

        from faser_trtllm.engine.cuda_fp8 import check_capability, check_product
        from faser_trtllm.engine.cuda_weights import DeviceWeights

        if quantization is Quantization.FP8:
            properties = torch.cuda.get_device_properties(self._ordinal)
            check_capability((properties.major, properties.minor), properties.name)
            check_product(runtime.device)
        return DeviceWeights.load(file, runtime.device, quantization=quantization)

    def free_bytes(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(self._ordinal)[0])

    def make_ops(self, runtime: Runtime, head_dim: int) -> Ops:
        from faser_trtllm.engine.cuda_ops import STEMS, KernelOps
        from faser_trtllm.engine.cuda_runtime import CudaRuntime
        from faser_trtllm.ops.cuda.compiler import compile_stem
        from faser_trtllm.ops.cuda.module import Launcher, Module, device_arch

        assert isinstance(runtime, CudaRuntime)
        arch = device_arch(self._ordinal)
        launchers: dict[str, Launcher] = {}
        for stem in STEMS:
            defines = {"FASER_HEAD_DIM": head_dim} if stem == "verify_attention" else None
            launchers[stem] = self._modules.enter_context(Module(compile_stem(stem, arch, defines=defines).path))
        return KernelOps(launchers, runtime.stream, self.whole.num_sms)

    def close(self) -> None:
        """Unload the kernels and destroy the partitions; engines must be closed before."""
        self._modules.close()
        self.partitions.close()

    def __enter__(self) -> CudaGpu:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class OpenedCudaEngines:
    """enter_mode: to be called between steps when the mode changes. tester: the free test on the target's device."""

    target: CudaEngine
    draft: CudaEngine | None
    enter_mode: Callable[[Mode], None]
    tester: DeviceAcceptor


def open_cuda_engines(
    engines: EngineDir,
    limits: BuildConfig,
    num_blocks: int,
    drafting: bool,
    gpu: Gpu,
    stack: ExitStack,
    quantization: Quantization = Quantization.NONE,
) -> OpenedCudaEngines:
    """Open the target and, if drafting, the draft, and capture their graphs; closed with the stack, the GPU is not.

    limits: what the executor asks for, at most what was built; max_draft_len is 0 unless drafting. num_blocks: KV
    blocks. quantization: of both. Raises EngineFileError for files that cannot be used, ConfigError for limits, for too
    little memory and for what the GPU cannot multiply, FaserError of the driver.
    """
    from faser_trtllm.engine.cuda_accept import DeviceAcceptor
    from faser_trtllm.engine.cuda_draft import DraftLaws
    from faser_trtllm.engine.cuda_memory import check_memory

    check_memory(engines, limits, num_blocks, drafting, quantization, gpu.free_bytes())
    laws = None
    if drafting and limits.max_draft_len:
        laws = DraftLaws(gpu.make_runtime(), limits.max_batch_size, limits.max_draft_len, engines.vocab_size)
    opening = (limits, num_blocks, quantization, gpu, stack)
    target, ops = _open(engines.target_path, *opening, None, keep_logits=True)
    draft = _open(engines.draft_path, *opening, laws, keep_logits=False)[0] if drafting else None
    tester = DeviceAcceptor(target, ops, limits.max_draft_len, laws)
    begun = time.monotonic()
    left_out = target.capture_graphs((gpu.whole, gpu.pair.target) if drafting else (gpu.whole,))
    num_graphs = len(target.graphs)
    if draft is not None:
        left_out += draft.capture_graphs((gpu.whole, gpu.pair.draft))
        num_graphs += len(draft.graphs)
    log.info(
        "%d CUDA graphs captured in %.1f s; the memory budget left out %d, whose passes are launched kernel by kernel",
        num_graphs,
        time.monotonic() - begun,
        left_out,
    )
    return OpenedCudaEngines(target, draft, GpuModes(gpu.whole, gpu.pair, target, draft).enter, tester)


def open_cuda_draft(engines: EngineDir, limits: BuildConfig, num_blocks: int, gpu: Gpu, stack: ExitStack) -> CudaEngine:
    """The draft alone, on its side of the pair: to draft beside a target that is not ours. As open_cuda_engines."""
    from faser_trtllm.engine.cuda_draft import DraftLaws

    laws = DraftLaws(gpu.make_runtime(), limits.max_batch_size, limits.max_draft_len, engines.vocab_size)
    opening = (limits, num_blocks, Quantization.NONE, gpu, stack)
    draft, _ = _open(engines.draft_path, *opening, laws, keep_logits=False)
    draft.capture_graphs((gpu.pair.draft,))
    draft.use(gpu.pair.draft)
    return draft


def _open(
    path: Path,
    limits: BuildConfig,
    num_blocks: int,
    quantization: Quantization,
    gpu: Gpu,
    stack: ExitStack,
    laws: DraftLaws | None,
    keep_logits: bool,
) -> tuple[CudaEngine, Ops]:
    from faser_trtllm.builder.cuda_engine_file import CudaFile
    from faser_trtllm.engine.cuda import CudaEngine
    from faser_trtllm.engine.cuda_limits import CudaLimits

    runtime = gpu.make_runtime()
    with CudaFile.open(path) as file:
        ops = gpu.make_ops(runtime, file.model["head_dim"])
        weights, segments = gpu.load_weights(file, runtime, quantization), file.segments
    engine = CudaEngine(
        weights,
        segments,
        ops,
        runtime,
        gpu.whole,
        CudaLimits(
            num_blocks=num_blocks,
            tokens_per_block=limits.tokens_per_block,
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            max_logit_rows=limits.max_batch_size * (1 + limits.max_draft_len),
            max_draft_len=limits.max_draft_len if laws is not None else 0,
        ),
        laws=laws,
        keep_logits=keep_logits,
    )
    return stack.enter_context(engine), ops
