"""The layers' matrices in e4m3 and the scales of their inputs, for networks with explicit quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from faser_trtllm.errors import CheckpointError
from faser_trtllm.models.fp8 import Fp8Matrix, quantize, stack
from faser_trtllm.models.weights import Weights


def is_layers(name: str, shape: tuple[int, ...]) -> bool:
    """Return True for a matrix of a layer, which fp8 engines hold in e4m3; not for LM head, embedding and norms."""
    return len(shape) == 2 and name.startswith("model.layers.")


class Fp8Layers(Protocol):
    """A source of fp8 matrices. Names are those of the checkpoint without .weight."""

    def matrix(self, names: tuple[str, ...], num_in: int, num_out: tuple[int, ...]) -> tuple[Fp8Matrix, float]:
        """Return stacked matrices [num_out[i], num_in] and the scale of their common inputs; raises CheckpointError."""


class CheckpointLayers:
    """Fp8Layers of a checkpoint.

    Matrices stored in e4m3 with one scale, or one per output, are stacked (models/fp8.py); others are quantized.
    """

    def __init__(self, weights: Weights, input_scales: Mapping[str, float]) -> None:
        """input_scales: by matrix; matrices that are multiplied as one use the largest."""
        self._weights = weights
        self._input_scales = input_scales

    def matrix(self, names: tuple[str, ...], num_in: int, num_out: tuple[int, ...]) -> tuple[Fp8Matrix, float]:
        scale = max(self._input_scales[name] for name in names)
        found = [self._weights.fp8_matrix(f"{name}.weight") for name in names]
        stored = [part for part in found if part is not None]
        if len(stored) == len(found):
            return stack(stored), scale
        shapes = [(size, num_in) for size in num_out]
        parts = [self._weights.float32(f"{name}.weight", shape) for name, shape in zip(names, shapes, strict=True)]
        try:
            return quantize(parts), scale
        except ValueError as error:
            raise CheckpointError(f"{' and '.join(names)} cannot be quantized: {error}") from error


class BlankLayers:
    """Fp8Layers of zeros, which suffice for a network's specification and cost no time."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def matrix(self, names: tuple[str, ...], num_in: int, num_out: tuple[int, ...]) -> tuple[Fp8Matrix, float]:
        found = [self._weights.fp8_matrix(f"{name}.weight") for name in names]
        stored = [part for part in found if part is not None]
        by_output = len(stored) == len(found) and any(part.has_output_scales for part in stored)
        scales = np.ones(sum(num_out) if by_output else (), np.float32)
        return Fp8Matrix(np.zeros((sum(num_out), num_in), np.uint8), scales), 1.0
