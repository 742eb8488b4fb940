"""Engines of a random Llama, with the same weights in several schemes."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder.cpu_engine import engine_model, engine_tensors
from faser_trtllm.builder.engine_file import write_engine_file
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.quantized_weight import Scheme
from faser_trtllm.models.rope import RopeConfig
from faser_trtllm.models.weights import Weights, bfloat16_from_float32

MAX_SEQ_LEN = 1024


def random_config(num_layers: int, hidden_size: int, intermediate_size: int, vocab_size: int) -> ModelConfig:
    """Return a configuration with heads of 64, four query heads per KV head and tied embeddings."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=hidden_size // 64,
        num_kv_heads=max(1, hidden_size // 256),
        head_dim=64,
        max_position_embeddings=MAX_SEQ_LEN,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        windows=(0,) * num_layers,
        tie_word_embeddings=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        torch_dtype="bfloat16",
        bos_token_id=None,
        eos_token_ids=(0,),
    )


class RandomWeights(Weights):
    """Weights from normal distributions; norms are 1."""

    def bfloat16(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        values = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[1]))
        return bfloat16_from_float32(values)

    def float32(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        return np.ones(shape, np.float32)


def write_random_engine(path: Path, config: ModelConfig, scheme: Scheme | None) -> None:
    """Write an engine file with weights that are the same for every scheme."""
    tensors = engine_tensors(config, RandomWeights(), scheme)
    write_engine_file(path, engine_model(config, MAX_SEQ_LEN), [0, config.num_layers], tensors, scheme=scheme)


def scheme_named(name: str) -> Scheme | None:
    """Parse a scheme, where a suffix +head quantizes the LM head."""
    text, _, head = name.partition("+")
    scheme = Scheme.parse(text)
    return scheme if scheme is None or not head else dataclasses.replace(scheme, lm_head=True)
