"""Device memory of an engine file's weights."""

from __future__ import annotations

from math import prod
from pathlib import Path

from faser_trtllm.builder.cuda_engine_file import ITEMSIZES, CudaFile, num_bytes, tensor_shapes
from faser_trtllm.config import Quantization
from faser_trtllm.engine.cuda.weights import FOLDED_NORMS, MATRICES

_SCALE_BYTES = 4


def weight_bytes(path: Path, quantization: Quantization) -> int:
    """Bytes of device memory for an engine file's weights, without small tables such as rope's."""
    with CudaFile.open(path) as file:
        total = num_bytes(file.model, file.dtype)
        for name, shape in tensor_shapes(file.model).items():
            part = name.rpartition(".")[2]
            if part in FOLDED_NORMS.values():
                total -= ITEMSIZES[file.dtype] * prod(shape)
            elif part in MATRICES and quantization is Quantization.FP8:
                total -= (ITEMSIZES[file.dtype] - 1) * prod(shape) - _SCALE_BYTES * shape[0]
    return total
