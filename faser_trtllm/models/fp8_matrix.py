"""Matrices in e4m3 with one scale, or one per output, as fp8 checkpoints hold them and TensorRT multiplies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from faser_trtllm.models.fp8 import LARGEST, NUMBERS, e4m3_from_float32
from faser_trtllm.models.weights import Float32Array, Weights

_SMALLEST_LARGEST = 1e-30  # what is smaller counts as zero: scales and their products stay normal numbers
_ROWS_PER_PIECE = 256  # bounds the memory of rounding


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """bits: e4m3, uint8 [out, in]. scales: float32 [] or [out]. A weight is its number times its scale.

    ValueError unless the shapes fit and all scales are positive and finite, as TensorRT asks for.
    """

    bits: npt.NDArray[np.uint8]
    scales: Float32Array

    def __post_init__(self) -> None:
        if self.bits.ndim != 2 or self.scales.shape not in ((), self.bits.shape[:1]):
            raise ValueError(f"scales {list(self.scales.shape)} do not fit a matrix of {list(self.bits.shape)}")
        if not (np.isfinite(self.scales) & (self.scales > 0)).all():
            raise ValueError("a scale is not positive and finite")

    @property
    def has_output_scales(self) -> bool:
        return self.scales.ndim == 1


@runtime_checkable
class StoredFp8(Protocol):
    """Weights (models/weights.py) of which some matrices are stored in e4m3."""

    def fp8_matrix(self, name: str) -> Fp8Matrix | None:
        """The matrix as it is stored; None if its type or its scales are others. Raises CheckpointError."""

    def input_scale(self, module: str) -> float | None:
        """The static scale of the inputs of a matrix, by its name without .weight; None if there is none."""


def stored_matrix(weights: Weights, name: str) -> Fp8Matrix | None:
    """The matrix as a checkpoint stores it, where it does so as a Fp8Matrix."""
    return weights.fp8_matrix(name) if isinstance(weights, StoredFp8) else None


def stored_input_scale(weights: Weights, module: str) -> float | None:
    """The static scale of a matrix's inputs, where a checkpoint has one."""
    return weights.input_scale(module) if isinstance(weights, StoredFp8) else None


def scale_of(largest: float) -> np.float32:
    """The scale that brings the largest absolute value to 448, as ModelOpt's; 1 where all are zero."""
    scale: np.float32 = np.float32(largest / LARGEST if largest > _SMALLEST_LARGEST else 1)
    return scale


def quantize(parts: Sequence[Float32Array]) -> Fp8Matrix:
    """Matrices [out[i], in], stacked, with one scale. ValueError if a weight is not finite."""
    if not all(np.isfinite(part).all() for part in parts):
        raise ValueError("a weight is not finite")
    scale = scale_of(max(float(np.abs(part).max(initial=0)) for part in parts))
    return Fp8Matrix(np.concatenate([_rounded(part, scale) for part in parts]), np.array(scale))


def stack(parts: Sequence[Fp8Matrix]) -> Fp8Matrix:
    """Matrices on top of each other, multiplied as one.

    Their numbers are kept if they have one scale in common, or if one of them has a scale per output. Otherwise they
    are rounded again with the largest of their scales, as TensorRT-LLM does: one scale is what fp8 products are fastest
    with.
    """
    if any(part.has_output_scales for part in parts):
        scales = np.concatenate([np.broadcast_to(part.scales, len(part.bits)) for part in parts])
        return Fp8Matrix(np.concatenate([part.bits for part in parts]), scales)
    largest = max(part.scales for part in parts)
    bits = [
        part.bits if part.scales == largest else _rounded(NUMBERS[part.bits] * part.scales, largest) for part in parts
    ]
    return Fp8Matrix(bits[0] if len(bits) == 1 else np.concatenate(bits), np.array(largest, np.float32))


def _rounded(weight: Float32Array, scale: Float32Array | np.float32) -> npt.NDArray[np.uint8]:
    bits = np.empty(weight.shape, np.uint8)
    for start in range(0, len(weight), _ROWS_PER_PIECE):
        rows = slice(start, start + _ROWS_PER_PIECE)
        bits[rows] = e4m3_from_float32(weight[rows] / scale)
    return bits
