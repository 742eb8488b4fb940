"""Make a model deeper without changing its outputs, to raise the target's cost.

Each added layer is a copy of a neighbor whose o_proj and down_proj (and their biases) are zero. It reads, computes and
stores as much as any layer and adds exactly zero to the residual stream. Logits and acceptance are unchanged; only time
and memory grow. Measurements that use this must say so.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.fp8 import Fp8Matrix
from faser_trtllm.models.weights import DerivedWeights, Dtype, Weights

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ZEROED = re.compile(r"(self_attn\.o_proj|mlp\.(experts\.\d+\.|shared_expert\.)?down_proj)\..+")


class ExpandedWeights(DerivedWeights):
    """Weights of the enlarged model, made tensor by tensor.

    Layer i of the enlarged model is the original's layer i // expand: that layer itself if i is a multiple of
    expand, and a copy with zeroed outputs otherwise.
    """

    def __init__(self, weights: Weights, expand: int) -> None:
        if expand < 1:
            raise InvalidArgumentError(f"expand is {expand}; it must be at least 1")
        self._weights = weights
        self._expand = expand

    def source(self, name: str) -> tuple[Weights, str]:
        return self._weights, self._source(name)[0]

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        source, zero = self._source(name)
        return np.zeros(self.shape(name), dtype) if zero else self._weights.read(source, dtype)

    def fp8_matrix(self, name: str) -> Fp8Matrix | None:
        source, zero = self._source(name)
        found = self._weights.fp8_matrix(source)
        return Fp8Matrix(np.zeros_like(found.bits), found.scales) if found is not None and zero else found

    def input_scale(self, module: str) -> float | None:
        return self._weights.input_scale(self._source(f"{module}.weight")[0].removesuffix(".weight"))

    def _source(self, name: str) -> tuple[str, bool]:
        """Return the tensor's name in the original, and True if this layer's copy of it is zero."""
        match = _LAYER_NAME.fullmatch(name)
        if match is None:
            return name, False
        index, rest = int(match[1]), match[2]
        zero = index % self._expand != 0 and _ZEROED.fullmatch(rest) is not None
        return f"model.layers.{index // self._expand}.{rest}", zero


def expand_config(config: ModelConfig, expand: int) -> ModelConfig:
    windows = tuple(window for window in config.windows for _ in range(expand))
    return dataclasses.replace(config, num_layers=config.num_layers * expand, windows=windows)
