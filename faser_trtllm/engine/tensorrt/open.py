"""Open the engines of a TensorRT engine directory."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.builder.network.vendor import load_tensorrt, rtx_refusal
from faser_trtllm.builder.plan_file import arch_capability
from faser_trtllm.engine.cuda.open import head_buffers, open_cuda_draft_file, open_hidden_rows
from faser_trtllm.engine.gpu.device import Gpu
from faser_trtllm.engine.gpu.memory import fit_blocks
from faser_trtllm.engine.gpu.open import open_draft_alone, open_pair
from faser_trtllm.engine.opening import OpenedEngines, OpenRequest
from faser_trtllm.errors import ConfigError, EngineFileError

if TYPE_CHECKING:
    from faser_trtllm.engine.cuda.hidden_rows import HiddenRows
    from faser_trtllm.engine.gpu.engine import GpuEngine
    from faser_trtllm.engine.gpu.ops import Ops
    from faser_trtllm.engine.gpu.sampler.draft_probs import DeviceDraftProbs


def open_engines(request: OpenRequest, stack: ExitStack) -> OpenedEngines:
    """See engine.opening.open_engines."""
    trt, gpu = _gpu(request.engines, stack, plain_streams=request.plain_streams)
    return open_plans(request, trt, gpu, stack)


def open_draft(request: OpenRequest, stack: ExitStack) -> GpuEngine:
    trt, gpu = _gpu(request.engines, stack, request.ordinal)
    return open_draft_alone(request, gpu, partial(_open, request, trt, gpu, stack, None))


def open_plans(request: OpenRequest, trt: Any, gpu: Gpu, stack: ExitStack) -> OpenedEngines:
    """Open the engines on a GPU; see open_pair. trt: the TensorRT module that the engines were built with.

    Raises EngineFileError for files that do not fit this GPU or this TensorRT, ConfigError for limits and for too
    little memory. The memory of the plans' contexts is not counted.
    """
    if request.engines.backend == "tensorrt_rtx":  # linear caches, always of as many rows as the engine was built for
        num_rows = request.engines.build_config.max_batch_size
        request = replace(request, num_blocks=num_rows, kv_memory_fraction=None)
    weights = {role: path.stat().st_size for role, path in request.paths.items()}
    buffers = head_buffers(request)
    request = replace(request, num_blocks=fit_blocks(request, weights, gpu.free_bytes(), buffers))
    hidden_rows = open_hidden_rows(request, gpu)

    def open_one(role: str, draft_probs: DeviceDraftProbs | None) -> tuple[GpuEngine, Ops]:
        if role == "draft" and hidden_rows is not None:  # heads run on torch and our kernels for any target
            return open_cuda_draft_file(request, gpu, stack, hidden_rows, draft_probs)
        return _open(request, trt, gpu, stack, hidden_rows, role, draft_probs)

    return open_pair(request, gpu, stack, open_one)


def _gpu(engines: EngineDir, stack: ExitStack, ordinal: int = 0, *, plain_streams: bool = False) -> tuple[Any, Gpu]:
    from faser_trtllm.engine.gpu.device import CudaGpu

    try:
        if engines.backend == "tensorrt_rtx":
            _check_rtx_gpu(engines, ordinal)
        return load_tensorrt(engines.backend), stack.enter_context(CudaGpu(ordinal, plain_streams=plain_streams))
    except ConfigError as error:
        raise ConfigError(
            f"{engines.path} holds {engines.backend} engines, which run on an NVIDIA GPU, and {error}; without one, "
            "faser generate --interpret runs a tensorrt_rtx engine's networks on the CPU"
        ) from error


def _check_rtx_gpu(engines: EngineDir, ordinal: int) -> None:
    """Raise EngineFileError if TensorRT for RTX refuses the GPU, before a plan is loaded; ConfigError without a GPU."""
    from faser_trtllm.ops.cuda.driver import device_arch, device_name

    capability = arch_capability(device_arch(ordinal))
    if refusal := rtx_refusal(capability):
        raise EngineFileError(
            f"{engines.path} holds tensorrt_rtx engines, {device_name(ordinal)} has compute capability {capability}, "
            f"and {refusal}; build with --backend cuda"
        )


def _open(
    request: OpenRequest,
    trt: Any,
    gpu: Gpu,
    stack: ExitStack,
    hidden_rows: HiddenRows | None,
    role: str,
    draft_probs: DeviceDraftProbs | None,
) -> tuple[GpuEngine, Ops]:
    from faser_trtllm.engine.gpu.decoder import Placement
    from faser_trtllm.engine.gpu.limits import GpuLimits
    from faser_trtllm.engine.tensorrt.engine import open_engine

    engines, runtime = request.engines, gpu.make_runtime()
    ops = gpu.make_ops(runtime, None)
    engine = open_engine(
        engines.target_path if role == "target" else engines.draft_path,
        trt,
        Placement(ops, runtime, gpu.whole),
        gpu.compute_capability,
        GpuLimits.of(request.limits, request.num_blocks, has_drafts=draft_probs is not None),
        draft_probs=draft_probs,
        cache_dir=_cache_dir(),
        hidden_rows=hidden_rows,
    )
    return stack.enter_context(engine), ops


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "faser_trtllm" / "tensorrt"
