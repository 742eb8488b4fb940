"""Device memory of an engine file's weights."""

from __future__ import annotations

from math import prod
from pathlib import Path

from faser_trtllm.builder.cuda_engine_file import ITEMSIZES, CudaFile, tensor_shapes, type_of
from faser_trtllm.builder.shard import Shard
from faser_trtllm.config import Quantization
from faser_trtllm.engine.cuda.weights import FOLDED_NORMS, MATRICES, WHOLE

_SCALE_BYTES = 4


def weight_bytes(path: Path, quantization: Quantization, shard: Shard = WHOLE) -> int:
    """Bytes of device memory for what a rank has of an engine file's weights, without small tables such as rope's."""
    with CudaFile.open(path) as file:
        total = 0
        for name, whole in tensor_shapes(file.model).items():
            rows = sum(own.stop - own.start for own in shard.rows(name, whole[0], file.model))
            shape = (rows, *whole[1:])
            total += ITEMSIZES[type_of(name, file.dtype)] * prod(shape)
            part = name.rpartition(".")[2]
            if part in FOLDED_NORMS.values() and name.startswith("layers."):
                total -= ITEMSIZES[file.dtype] * prod(shape)
            elif part in MATRICES and quantization is Quantization.FP8:
                total -= (ITEMSIZES[file.dtype] - 1) * prod(shape) - _SCALE_BYTES * shape[0]
    return total


def place_logits_bytes(path: Path, max_batch_size: int) -> int:
    """Bytes of the logits of all places that Medusa heads make at once; 0 for another draft."""
    with CudaFile.open(path) as file:
        num_heads = file.model["medusa"]["num_heads"] if "medusa" in file.model else 0
        return 4 * int(num_heads * max_batch_size * file.model["vocab_size"])
