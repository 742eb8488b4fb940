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
    """The tensors of a file, decoded when they are read. The caller closes the file."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        """Raise CheckpointError for the first tensor that no model of this configuration has."""
        self._file = file
        self._heads = {}
        self._architecture = file.metadata["general.architecture"]
        if self._architecture == "llama":
            self._heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}
        self._num_experts = 0 if config.experts is None else config.experts.num_experts
        known = {gguf_name(name, self._architecture)[0] for name in expected_shapes(config)} | {ROPE_FREQS}
        for name in file.tensors:
            if name not in known:
                raise CheckpointError(
                    f"{file.path.name}: tensor {name} belongs to no {config.architecture} that is supported"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        stored, tensor, expert = self._tensor(name)
        if expert is None:
            # GGUF stores a matrix of one row as a vector.
            is_row = len(tensor.shape) == 1 and name.endswith(".shared_expert_gate.weight")
            return (1, *tensor.shape) if is_row else tensor.shape
        if tensor.shape[0] != self._num_experts:
            raise CheckpointError(
                f"{self._file.path.name}: tensor {stored} has shape {list(tensor.shape)}, the configuration asks for "
                f"{self._num_experts} experts"
            )
        return tensor.shape[1:]

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        stored, tensor, expert = self._tensor(name)
        shape, width = self.shape(name), tensor.shape[-1]
        data = self._file.data(stored)
        if expert is not None:
            data = data.reshape(self._num_experts, -1)[expert]
        rows = data.reshape(math.prod(shape[:-1]), -1)
        if tensor.type is TensorType.BF16 and dtype is np.uint16:
            return self._in_halves(name, rows.view("<u2").reshape(shape))
        values = np.empty((len(rows), width), dtype)
        step = max(1, _VALUES_PER_PIECE // width)
        for start in range(0, len(rows), step):
            with np.errstate(all="ignore"):  # damaged scales; the values are checked below
                piece = dequantize(rows[start : start + step], tensor.type)
            if not np.isfinite(piece).all():
                raise CheckpointError(
                    f"{self._file.path.name}: tensor {stored} has values that are infinite or no numbers; the file is "
                    "damaged"
                )
            values[start : start + step] = converted(piece, dtype)
        return self._in_halves(name, values.reshape(shape))

    def _tensor(self, name: str) -> tuple[str, GgufTensor, int | None]:
        """Return a tensor's name and entry in the file, and the index of an expert in it or None."""
        stored, expert = gguf_name(name, self._architecture)
        tensor = self._file.tensors.get(stored)
        if tensor is None:
            raise CheckpointError(f"{self._file.path.name}: tensor {stored} is missing")
        return stored, tensor, expert

    def _in_halves(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the rows of q_proj and k_proj in our order; other tensors unchanged.

        GGUF's rope for llama rotates neighbors, so files store each head's rows as 0, d/2, 1, d/2 + 1, ...; our rope
        rotates row i with row i + d/2.
        """
        num_heads = self._heads.get(name.rpartition(".")[0].split(".", 3)[-1])
        if num_heads is None:
            return values
        pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, -1)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
