"""Estimate the device memory of engine files: weights and the buffers of heads and mixtures."""

from __future__ import annotations

from math import prod
from pathlib import Path

from faser_trtllm.builder.cuda_engine_file import ITEMSIZES, CudaFile, tensor_shapes, type_of
from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.shard import Shard
from faser_trtllm.config import KvCacheDtype, Quantization
from faser_trtllm.engine.cuda.block_rows import num_own_blocks
from faser_trtllm.engine.cuda.weights import MATRICES, WHOLE, folded_norms

_SCALE_BYTES = 4


def weight_bytes(path: Path, quantization: Quantization, shard: Shard = WHOLE) -> int:
    """Return the bytes of a rank's share of an engine file's weights, without small tables such as rope's."""
    with CudaFile.open(path) as file:
        total = 0
        for name, whole in tensor_shapes(file.model).items():
            rows = sum(own.stop - own.start for own in shard.rows(name, whole[0], file.model))
            shape = (rows, *whole[1:])
            total += ITEMSIZES[type_of(name, file.dtype)] * prod(shape)
            part = name.rpartition(".")[2]
            if name.startswith("layers.") and part in folded_norms(file.model).values():
                total -= ITEMSIZES[file.dtype] * prod(shape)
            elif part in MATRICES and quantization is Quantization.FP8:
                total -= (ITEMSIZES[file.dtype] - 1) * prod(shape) - _SCALE_BYTES * shape[0]
    return total


def block_bytes(path: Path, limits: BuildConfig, kv_dtype: KvCacheDtype) -> dict[str, int]:
    """Return, by name, the bytes of drafted blocks: of their KV and of the logits of all places."""
    with CudaFile.open(path) as file:
        model, block, itemsize = file.model, file.model["block"], ITEMSIZES[file.dtype]
    requests = limits.max_batch_size
    num_tokens = requests * num_own_blocks(block["block_size"], limits.tokens_per_block) * limits.tokens_per_block
    token_values = 2 * model["num_layers"] * model["num_kv_heads"] * model["head_dim"]
    num_places = max(1, min(block["block_size"] - block["first_slot"], limits.max_draft_len))
    return {
        "KV of drafted blocks": num_tokens * token_values * (1 if kv_dtype is KvCacheDtype.FP8 else itemsize),
        "logits of drafted blocks": 4 * requests * num_places * model["vocab_size"],
    }


def pair_bytes(path: Path, max_num_tokens: int) -> int:
    """Return the bytes that a mixture's layer allocates for pairs of row and expert in a pass of this many rows; 0
    for a dense model."""
    with CudaFile.open(path) as file:
        experts = file.model.get("experts")
        if experts is None:
            return 0
        width = 2 * file.model["hidden_size"] + 3 * experts["intermediate_size"]
        return int(max_num_tokens * experts["top_k"] * width * ITEMSIZES[file.dtype])


def place_logits_bytes(path: Path, max_batch_size: int) -> int:
    """Return the bytes of the logits that Medusa heads compute at once for all places; 0 for other drafts."""
    with CudaFile.open(path) as file:
        num_heads = file.model["medusa"]["num_heads"] if "medusa" in file.model else 0
        return 4 * int(num_heads * max_batch_size * file.model["vocab_size"])
