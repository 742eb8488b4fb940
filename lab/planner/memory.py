"""The batch size that fits into a GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.errors import InvalidArgumentError
from lab.costmodel.gpu import Gpu
from lab.costmodel.shape import NUM_GPUS, ModelShape

USABLE = 0.9  # share of the memory for weights, caches and work space
WORK_GB = 3.0  # CUDA, graphs and activations (assumed)


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one GPU in 10^9 bytes. kv_tokens: tokens in the caches of the target and, if any, the draft model.
    max_batch_size: requests of mean_len tokens that fit at a time."""

    weights_gb: float
    kv_gb: float
    kv_tokens: int
    mean_len: int
    max_batch_size: int


def plan_memory(gpu: Gpu, target: ModelShape, draft: ModelShape | None, mean_len: int) -> MemoryPlan:
    """Plan the memory; InvalidArgumentError if the models leave no room for one request."""
    found = _room(gpu, target, draft, mean_len)
    if not found.max_batch_size:
        names = target.name if draft is None else f"{target.name} with {draft.name}"
        raise InvalidArgumentError(
            f"{names} takes {found.weights_gb:.1f} GB of weights on each {gpu.name}, of whose {gpu.memory_gb:g} GB "
            f"{USABLE * gpu.memory_gb - WORK_GB:.1f} are for weights and caches, so not one request of {mean_len} "
            f"tokens fits; take {' or '.join([*_fixes(gpu, target, draft, mean_len), 'a smaller model'])}"
        )
    return found


def _room(gpu: Gpu, target: ModelShape, draft: ModelShape | None, mean_len: int) -> MemoryPlan:
    models = [target] if draft is None else [target, draft]
    weights_gb = sum(model.resident_gb for model in models)
    kv_gb = USABLE * gpu.memory_gb - WORK_GB - weights_gb
    kv_tokens = int(max(0.0, kv_gb) / sum(model.token_gb for model in models))
    return MemoryPlan(weights_gb, kv_gb, kv_tokens, mean_len, kv_tokens // mean_len)


def _fixes(gpu: Gpu, target: ModelShape, draft: ModelShape | None, mean_len: int) -> list[str]:
    """Return flags with which it would fit."""
    if target.experts is not None:  # planned for one GPU, and served in bfloat16
        return []
    most = NUM_GPUS[-1]
    found = []
    if target.num_gpus < most and _room(gpu, target.on(most), draft, mean_len).max_batch_size:
        found.append(f"--num_gpus {most}")
    if gpu.has_fp8 and target.weight_bytes == 2 and _room(gpu, target.in_fp8(), draft, mean_len).max_batch_size:
        found.append("--quantization fp8")
    return found
