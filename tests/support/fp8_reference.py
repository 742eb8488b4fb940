"""The torch reference with its layers in e4m3, quantized by torch: independent of what the builder does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.reference import ReferenceModel
from faser_trtllm.models.weights import Weights

FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Matrices of a layer that are multiplied as one, and so share the scale of their inputs."""


def through_e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x [..] after quantization with a scale and back, fp32."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def rounded_once(matrices: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Matrices [out, in] of a model by name (without .weight), each group of FUSED rounded to e4m3 with one scale."""
    found = {}
    for group in _groups(matrices):
        scale = float(np.float32(max(float(np.abs(matrices[name]).max()) for name in group) / 448))
        for name in group:
            found[name] = through_e4m3(torch.from_numpy(matrices[name]), scale)
    return found


def largest_of_groups(scales: Mapping[str, float]) -> dict[str, float]:
    """Scales of inputs by name, each the largest of its group's."""
    return {name: max(scales[other] for other in group) for group in _groups(scales) for name in group}


class Fp8Reference(ReferenceModel):
    """matrices: fp32, by name, exactly what the e4m3 numbers stand for. input_scales: of each."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        matrices: Mapping[str, torch.Tensor],
        input_scales: Mapping[str, float],
    ) -> None:
        super().__init__(config, weights)
        self._matrices = matrices
        self._input_scales = input_scales

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.add_bias(name, through_e4m3(x, self._input_scales[name]) @ self._matrices[name].T)


def _groups(names: Mapping[str, object]) -> list[list[str]]:
    layers = sorted({name.split(".")[2] for name in names}, key=int)
    return [[f"model.layers.{layer}.{part}" for part in group] for layer in layers for group in FUSED]
