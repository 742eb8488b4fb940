"""Random mixtures of experts as Hugging Face folders, with an overlap of experts like that of trained models."""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.peers.checkpoint import write_checkpoint
from benchmarks.quantization.random_model import RandomWeights
from faser_trtllm.models.config import load_model_config
from faser_trtllm.models.weights import bfloat16_from_float32

TOKENIZER = Path(__file__).parents[2] / "engines/demo/target/tokenizer.json"
VOCAB_SIZE = 4096  # of the tokenizer, which no system uses
EMBEDDING = "model.embed_tokens.weight"
_ONE = 0x3F80  # in bf16


@dataclass(frozen=True)
class MoeSizes:
    """The sizes of a Qwen3-MoE with heads of 64, four query heads to a KV head."""

    num_layers: int = 14
    hidden_size: int = 1024
    num_experts: int = 64
    top_k: int = 4
    expert_size: int = 768
    max_seq_len: int = 1024

    def settings(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden_size,
            "intermediate_size": 4 * self.hidden_size,  # for dense layers; there are none
            "moe_intermediate_size": self.expert_size,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.hidden_size // 64,
            "num_key_value_heads": max(1, self.hidden_size // 256),
            "head_dim": 64,
            "max_position_embeddings": self.max_seq_len,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
        }


class MoeWeights(RandomWeights):
    """Random weights by name. Neighboring rows share what layers add, so a larger embedding routes them less alike."""

    def __init__(self, embedding_scale: float) -> None:
        self._embedding_scale = embedding_scale

    def bfloat16(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
        if len(shape) == 1:
            return np.full(shape, _ONE, np.uint16)
        if name != EMBEDDING:
            return super().bfloat16(name, shape)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return bfloat16_from_float32(rng.standard_normal(shape, np.float32) * np.float32(self._embedding_scale))


def write_moe_checkpoint(directory: Path, sizes: MoeSizes, embedding_scale: float) -> Path:
    """Write the folder unless it exists."""
    done = directory / "done"
    if not done.exists():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(sizes.settings(), indent=2))
        shutil.copy(TOKENIZER, directory / "tokenizer.json")
        write_checkpoint(directory, directory, load_model_config(directory), MoeWeights(embedding_scale))
        done.touch()
    return directory
