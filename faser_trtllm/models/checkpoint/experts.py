"""Expert tensors of Mixtral and gpt-oss under Qwen3's names."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.fp8 import Fp8Matrix
from faser_trtllm.models.mxfp4 import BLOCK_SIZE, mxfp4_values
from faser_trtllm.models.weights import CheckpointWeights, DerivedWeights, Dtype, Weights, converted

_OF_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_ROUTER = re.compile(r"(?<=\.mlp)\.gate(?=\.(weight|bias)$)")
_TAKING_TURNS = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
_ROWS_PER_PIECE = 256  # bounds the memory of decoding
_MODULE = re.compile(r"(?<=\.)mlp\.(gate|experts\.\d+\.(gate|up|down)_proj)(?=\.)")
_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}


class MixtralWeights(DerivedWeights):
    """A Mixtral's tensors: block_sparse_moe.experts.E.w1, w3 and w2 are an expert's gate, up and down."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def source(self, name: str) -> tuple[Weights, str]:
        return self._weights, _MODULE.sub(_mixtral_module, name)

    def fp8_matrix(self, name: str) -> Fp8Matrix | None:
        return self._weights.fp8_matrix(self.source(name)[1])

    def input_scale(self, module: str) -> float | None:
        return self._weights.input_scale(self.source(f"{module}.")[1].removesuffix("."))


def _mixtral_module(found: re.Match[str]) -> str:
    module, matrix = found[1], found[2]
    if matrix is not None:
        module = module.removesuffix(f"{matrix}_proj") + _MATRICES[matrix]
    return f"block_sparse_moe.{module}"


class GptOssWeights(Weights):
    """Tensors of a gpt-oss model. One tensor has all experts of a layer, and outputs of gate and up alternate in it.

    A matrix X is [experts, in, out], or in MXFP4 X_blocks [experts, out, in / 32, 16] and X_scales [experts, out,
    in / 32]. X_bias is [experts, out].
    """

    def __init__(self, weights: CheckpointWeights, num_experts: int) -> None:
        self._weights = weights
        self._num_experts = num_experts

    def shape(self, name: str) -> tuple[int, ...]:
        found = _OF_EXPERT.fullmatch(name)
        if found is None:
            return self._weights.shape(_ROUTER.sub(".router", name))
        stored, rows = self._stored(found)
        num_in: tuple[int, ...] = ()
        if found[4] == "bias":
            (num_out,) = self._sizes(f"{stored}_bias", 2)
        elif f"{stored}_blocks" in self._weights:
            num_out, num_blocks, num_bytes = self._sizes(f"{stored}_blocks", 4)
            if num_bytes * 2 != BLOCK_SIZE or self._sizes(f"{stored}_scales", 3) != (num_out, num_blocks):
                raise CheckpointError(
                    f"tensors {stored}_blocks {list(self._weights.shape(f'{stored}_blocks'))} and {stored}_scales "
                    f"{list(self._weights.shape(f'{stored}_scales'))} are no MXFP4 matrices in blocks of {BLOCK_SIZE}"
                )
            num_in = (num_blocks * BLOCK_SIZE,)
        else:
            first, num_out = self._sizes(stored, 3)
            num_in = (first,)
        return (len(range(num_out)[rows]), *num_in)

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        found = _OF_EXPERT.fullmatch(name)
        if found is None:
            return self._weights.read(_ROUTER.sub(".router", name), dtype)
        (stored, rows), expert = self._stored(found), int(found[2])
        if found[4] == "bias":
            return np.ascontiguousarray(self._weights.part(f"{stored}_bias", expert, dtype)[rows])
        if f"{stored}_blocks" not in self._weights:
            return np.ascontiguousarray(self._weights.part(stored, expert, dtype)[:, rows].T)
        blocks = self._weights.uint8(f"{stored}_blocks")[expert, rows]
        scales = self._weights.uint8(f"{stored}_scales")[expert, rows]
        matrix = np.empty(self.shape(name), dtype)
        for start in range(0, len(matrix), _ROWS_PER_PIECE):
            piece = slice(start, start + _ROWS_PER_PIECE)
            values = mxfp4_values(blocks[piece], scales[piece])
            if not np.isfinite(values).all():
                raise CheckpointError(f"tensor {stored}_blocks is not finite everywhere; the file is damaged")
            matrix[piece] = converted(values, dtype)
        return matrix

    def _stored(self, found: re.Match[str]) -> tuple[str, slice]:
        """Return the name of the tensor that holds an expert's gate, up or down, and the slice of its outputs."""
        if found[3] == "down":
            return f"{found[1]}.down_proj", slice(None)
        return f"{found[1]}.gate_up_proj", _TAKING_TURNS[found[3]]

    def _sizes(self, stored: str, num_dims: int) -> tuple[int, ...]:
        shape = self._weights.shape(stored)
        if len(shape) != num_dims or shape[0] != self._num_experts:
            raise CheckpointError(
                f"tensor {stored} has shape {list(shape)}; it must have {num_dims} dimensions and "
                f"{self._num_experts} experts in the first"
            )
        return shape[1:]
