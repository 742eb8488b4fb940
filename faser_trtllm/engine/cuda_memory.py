"""Whether a pair fits a GPU, counted before anything is loaded."""

from __future__ import annotations

from math import prod
from pathlib import Path

from faser_trtllm.builder.cuda_engine_file import ITEMSIZES, CudaFile, num_bytes, tensor_shapes
from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.config import Quantization
from faser_trtllm.engine.cuda_weights import MATRICES
from faser_trtllm.errors import ConfigError

_GIB = 1 << 30
_SCALE_BYTES = 4


def check_memory(
    engines: EngineDir,
    limits: BuildConfig,
    num_blocks: int,
    drafting: bool,
    quantization: Quantization,
    free_bytes: int,
) -> None:
    """ConfigError unless weights, KV caches and logits fit free_bytes of device memory.

    Graphs and the libraries' workspaces come on top, so what passes may still be too much.
    """
    parts = {"target": engines.target_path} | ({"draft": engines.draft_path} if drafting else {})
    weights = {f"weights of the {role}": weight_bytes(path, quantization) for role, path in parts.items()}
    rows = max(min(limits.max_batch_size * (1 + limits.max_draft_len), limits.max_num_tokens), limits.max_batch_size)
    logits = 4 * len(parts) * rows * engines.vocab_size
    laws = 4 * (limits.max_batch_size + 1) * limits.max_draft_len * engines.vocab_size
    cache = num_blocks * limits.tokens_per_block * engines.kv_bytes_per_token
    needed = weights | {"KV caches": cache, "logits and laws": logits + laws}
    total = sum(needed.values())
    if total > free_bytes:
        listed = ", ".join(f"{what} {size / _GIB:.2f}" for what, size in needed.items())
        smaller = "" if quantization is Quantization.FP8 else ", set quantization to fp8"
        raise ConfigError(
            f"the engines need {total / _GIB:.2f} GiB of GPU memory ({listed}), the GPU has {free_bytes / _GIB:.2f} "
            f"free; lower kv_cache_config.max_tokens or max_batch_size{smaller} or take a larger GPU, a model is not "
            "split over several"
        )


def weight_bytes(path: Path, quantization: Quantization) -> int:
    """Device memory of an engine file's weights; tables of rotations and the like are not counted."""
    with CudaFile.open(path) as file:
        total = num_bytes(file.model, file.dtype)
        if quantization is Quantization.FP8:
            for name, shape in tensor_shapes(file.model).items():
                if name.rpartition(".")[2] in MATRICES:
                    total -= (ITEMSIZES[file.dtype] - 1) * prod(shape) - _SCALE_BYTES * shape[0]
    return total
