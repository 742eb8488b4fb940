"""Pad or cut a model's vocab_size to match its partner's.

Models of one family share a tokenizer and pad their embeddings differently (Qwen2.5: 151,936 and 152,064).
Padding rows carry no meaning, so a draft can take its target's vocab_size.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.fp8_matrix import Fp8Matrix, stored_input_scale, stored_matrix
from faser_trtllm.models.weights import Weights

_VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")


class ResizedVocabulary:
    """Weights with a resized embedding and head; same interface as CheckpointWeights.

    Rows are cut off at the end, or added as copies of the last one: a copied padding row is as unlikely as padding,
    whereas a row of zeros has logit 0 and may win.
    """

    def __init__(self, weights: Weights, vocab_size: int) -> None:
        self._weights = weights
        self._vocab_size = vocab_size

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; CheckpointError if the original has none."""
        shape = self._weights.shape(name)
        return (self._vocab_size, *shape[1:]) if name in _VOCABULARY_TENSORS else shape

    def bfloat16(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
        """The tensor as bf16 bits, shape checked."""
        if name not in _VOCABULARY_TENSORS:
            return self._weights.bfloat16(name, shape)
        return self._weights.bfloat16(name, self._weights.shape(name))[self._rows(name)]

    def float32(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """The tensor as fp32, shape checked."""
        if name not in _VOCABULARY_TENSORS:
            return self._weights.float32(name, shape)
        return self._weights.float32(name, self._weights.shape(name))[self._rows(name)]

    def fp8_matrix(self, name: str) -> Fp8Matrix | None:
        """A layer's matrix in e4m3, where the original stores it so."""
        return None if name in _VOCABULARY_TENSORS else stored_matrix(self._weights, name)

    def input_scale(self, module: str) -> float | None:
        """The original's scale of a matrix's inputs."""
        return stored_input_scale(self._weights, module)

    def _rows(self, name: str) -> npt.NDArray[np.int64]:
        last = self._weights.shape(name)[0] - 1
        return np.minimum(np.arange(self._vocab_size), last)


def resize_vocabulary(config: ModelConfig, vocab_size: int) -> ModelConfig:
    """The configuration of the model with this vocab_size."""
    return dataclasses.replace(config, vocab_size=vocab_size)
