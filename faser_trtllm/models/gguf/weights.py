"""Weights of a GGUF file under their Hugging Face names, decoded on demand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import dequantize

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.gguf.config import ROPE_FREQS, gguf_name
from faser_trtllm.models.gguf.file import GgufFile, GgufTensor, TensorType
from faser_trtllm.models.weights import Dtype, Weights, converted, expected_shapes

_VALUES_PER_PIECE = 1 << 20  # bounds the memory of decoding


class GgufWeights(Weights):
    """The tensors of one file, decoded as they are read. The caller owns the file."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        """CheckpointError for the first tensor that no model of this configuration has."""
        self._file = file
        self._heads = {}
        if file.metadata["general.architecture"] == "llama":
            self._heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}
        known = {gguf_name(name) for name in expected_shapes(config)} | {ROPE_FREQS}
        for name in file.tensors:
            if name not in known:
                raise CheckpointError(
                    f"{file.path.name}: tensor {name} belongs to no {config.architecture} that is supported"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        tensor = self._tensor(name)
        rows = self._file.data(gguf_name(name)).reshape(math.prod(tensor.shape[:-1]), -1)
        if tensor.type is TensorType.BF16 and dtype is np.uint16:
            return self._in_halves(name, rows.view("<u2").reshape(tensor.shape))
        width = tensor.shape[-1]
        values = np.empty((len(rows), width), dtype)
        step = max(1, _VALUES_PER_PIECE // width)
        for start in range(0, len(rows), step):
            with np.errstate(all="ignore"):  # of damaged scales; the values are looked at below
                piece = dequantize(rows[start : start + step], tensor.type)
            if not np.isfinite(piece).all():
                raise CheckpointError(
                    f"{self._file.path.name}: tensor {gguf_name(name)} has values that are infinite or no numbers; "
                    "the file is damaged"
                )
            values[start : start + step] = converted(piece, dtype)
        return self._in_halves(name, values.reshape(tensor.shape))

    def _tensor(self, name: str) -> GgufTensor:
        tensor = self._file.tensors.get(gguf_name(name))
        if tensor is None:
            raise CheckpointError(f"{self._file.path.name}: tensor {gguf_name(name)} is missing")
        return tensor

    def _in_halves(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Undo the order of rows in files of the llama architecture.

        Its rope rotates neighbours, so each head's rows are stored as 0, d/2, 1, d/2 + 1, ...; ours rotates row i with
        row i + d/2.
        """
        num_heads = self._heads.get(name.rpartition(".")[0].split(".", 3)[-1])
        if num_heads is None:
            return values
        pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, -1)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
