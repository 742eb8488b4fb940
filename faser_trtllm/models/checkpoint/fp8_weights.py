"""Matrices of fp8 checkpoints, dequantized on demand.

A matrix X [out, in] is stored in e4m3 as X.weight. A weight is its e4m3 number times its scale:
- X.weight_scale, one number, one per output ([out] or [out, 1]) or one per block, in compressed-tensors ("float-
  quantized"), ModelOpt and AutoFP8;
- X.weight_scale_inv, one per block, in DeepSeek's and Qwen's checkpoints.
X.input_scale, one number, is the static scale of X's inputs, if there is one. Scales of KV caches are not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.checkpoint.quantization import Fp8Config
from faser_trtllm.models.fp8 import NUMBERS, Fp8Matrix
from faser_trtllm.models.weights import FP8, CheckpointWeights, Dtype, Weights, converted

_ROWS_PER_PIECE = 256  # bounds the memory of dequantizing


class Fp8Weights(Weights):
    """Weights of an fp8 checkpoint. Tensors that are not quantized pass unchanged."""

    def __init__(self, weights: CheckpointWeights, config: Fp8Config) -> None:
        self._weights = weights
        self._config = config

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; CheckpointError if there is none of this name or its scales do not fit."""
        shape = self._weights.shape(name)
        if self._is_scaled(name):
            self._scales_shape(name)
        return shape

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        if not self._is_scaled(name):
            return self._weights.read(name, dtype)
        matrix = np.empty(self.shape(name), dtype)
        for rows, values in self._pieces(name):
            matrix[rows] = converted(values, dtype)
        return matrix

    def fp8_matrix(self, name: str) -> Fp8Matrix | None:
        """Return a matrix as a read-only view of the file; None if it is not in e4m3 or has a scale per block.

        CheckpointError for scales that are not positive and finite.
        """
        if self._config.block is not None or not self._is_scaled(name):
            return None
        scales, (num_scales, _) = self._scales_name(name), self._scales_shape(name)
        stored = self._weights.read(scales, np.float32)
        try:
            return Fp8Matrix(self._weights.fp8(name), stored.reshape((num_scales,) if num_scales > 1 else ()))
        except ValueError as error:
            raise CheckpointError(f"tensor {scales} cannot be used: {error}") from error

    def input_scale(self, module: str) -> float | None:
        """Return the static scale of a matrix's inputs or None; CheckpointError unless it is positive and finite."""
        name = f"{module}.input_scale"
        if name not in self._weights:
            return None
        found = self._weights.read(name, np.float32).reshape(-1)
        if found.size != 1 or not np.isfinite(found[0]) or found[0] <= 0:
            raise CheckpointError(f"tensor {name} is {found[:4].tolist()}; it must be one positive number")
        return float(found[0])

    def _is_scaled(self, name: str) -> bool:
        return name in self._weights and self._weights.dtype(name) == FP8

    def _scales_name(self, name: str) -> str:
        for suffix in ("_scale", "_scale_inv"):
            if name + suffix in self._weights:
                return name + suffix
        raise CheckpointError(f"tensor {name} is of type {FP8}, and {name}_scale is missing; fetch the files again")

    def _scales_shape(self, name: str) -> tuple[int, int]:
        """Return (blocks of outputs, blocks of inputs) that have scales; CheckpointError if the scales do not fit."""
        scales, shape = self._scales_name(name), self._weights.shape(name)
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"tensor {name} of type {FP8} has shape {list(shape)}; it must be a matrix")
        num_out, num_in = shape
        found, block = self._weights.shape(scales), self._config.block
        if block is None and found in ((), (1,), (1, 1)):
            return 1, 1
        if block is None and found in ((num_out,), (num_out, 1)):
            return num_out, 1
        if block is not None:
            blocks = -(-num_out // block[0]), -(-num_in // block[1])
            if found in (blocks, (blocks[0], 1, blocks[1], 1)):  # the second is ModelOpt's
                return blocks
        kind = f"blocks of {block[0]} x {block[1]}" if block else "one scale or one per output"
        raise CheckpointError(
            f"tensor {scales} has shape {list(found)}, which does not fit a matrix of {num_out} x {num_in} with {kind}"
        )

    def _pieces(self, name: str) -> Iterator[tuple[slice, npt.NDArray[np.float32]]]:
        """Yield slices of outputs, each with its weights, fp32 [outputs, in]."""
        bits, scales_name = self._weights.fp8(name), self._scales_name(name)
        num_out, num_in = bits.shape
        blocks = self._scales_shape(name)
        stored = self._weights.read(scales_name, np.float32).reshape(blocks)
        block = self._config.block
        for start in range(0, num_out, _ROWS_PER_PIECE):
            rows = slice(start, min(start + _ROWS_PER_PIECE, num_out))
            if block is not None:
                scales = stored[np.arange(rows.start, rows.stop) // block[0]]
                scales = np.repeat(scales, min(block[1], num_in), axis=1)[:, :num_in]
            else:
                scales = stored[rows] if blocks[0] > 1 else stored
            yield rows, NUMBERS[bits[rows]] * scales
