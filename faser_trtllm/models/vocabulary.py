"""Pad or cut a model's vocab_size to match its partner's.

Models of one family share a tokenizer and pad their embeddings differently (Qwen2.5: 151,936 and 152,064).
Padding rows carry no meaning, so a draft can take its target's vocab_size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.fp8 import Fp8Matrix
from faser_trtllm.models.weights import Dtype, Weights

_VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")


class ResizedVocabulary(Weights):
    """Weights with a resized embedding and head.

    Rows are cut off at the end, or added as copies of the last one: a copied padding row is as unlikely as padding,
    whereas a row of zeros has logit 0 and may win.
    """

    def __init__(self, weights: Weights, vocab_size: int) -> None:
        self._weights = weights
        self._vocab_size = vocab_size

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._weights.shape(name)
        return (self._vocab_size, *shape[1:]) if name in _VOCABULARY_TENSORS else shape

    def read(self, name: str, dtype: Dtype) -> npt.NDArray[Any]:
        tensor = self._weights.read(name, dtype)
        if name not in _VOCABULARY_TENSORS:
            return tensor
        return tensor[np.minimum(np.arange(self._vocab_size), len(tensor) - 1)]

    def fp8_matrix(self, name: str) -> Fp8Matrix | None:
        return None if name in _VOCABULARY_TENSORS else self._weights.fp8_matrix(name)

    def input_scale(self, module: str) -> float | None:
        return self._weights.input_scale(module)


def resize_vocabulary(config: ModelConfig, vocab_size: int) -> ModelConfig:
    """The configuration of the model with this vocab_size."""
    return dataclasses.replace(config, vocab_size=vocab_size)
