"""The models of the comparison as Hugging Face folders, with the bytes and operations of a pass.

Rows of a mixture are from unrelated sequences.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.peers.checkpoint import write_checkpoint
from benchmarks.quantization.random_model import RandomWeights, random_config
from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.models.config import ModelConfig, load_model_config
from faser_trtllm.models.weights import expected_shapes

EMBEDDING = "model.embed_tokens.weight"
SIZES = (24, 1024, 4096, 32000)  # 431 million weights, of which a pass reads 398 million
BITS = {"bf16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class Model:
    """A model. checkpoint_dir: a Llama or Qwen3-MoE in bf16, with a tokenizer.json."""

    name: str
    checkpoint_dir: Path

    def config(self) -> ModelConfig:
        return load_model_config(self.checkpoint_dir)

    def num_read(self, num_rows: int) -> float:
        """Return the weights in matrices that a pass reads, of a mixture with the expected distinct experts.

        An embedding counts only if it is the LM head.
        """
        config = self.config()
        if config.experts is None:
            return self._num_read(1.0)
        routing = Routing(config.experts.num_experts, config.experts.top_k)
        return self._num_read(routing.distinct([1] * num_rows) / config.experts.num_experts)

    def _num_read(self, share_of_experts: float) -> float:
        config = self.config()
        return sum(
            math.prod(shape) * (share_of_experts if ".experts." in name else 1.0)
            for name, shape in expected_shapes(config).items()
            if len(shape) == 2 and (name != EMBEDDING or config.tie_word_embeddings)
        )

    def num_weights(self) -> int:
        return sum(map(math.prod, expected_shapes(self.config()).values()))

    def flop(self, num_rows: int, num_logit_rows: int) -> float:
        """Return the operations in the matrices, without attention on short contexts."""
        config = self.config()
        head = config.vocab_size * config.hidden_size
        share = 1.0 if config.experts is None else config.experts.top_k / config.experts.num_experts
        return 2.0 * ((self._num_read(share) - head) * num_rows + head * num_logit_rows)


def write_random_checkpoint(
    directory: Path, tokenizer_file: Path, sizes: tuple[int, int, int, int] = SIZES, max_seq_len: int = 1024
) -> Path:
    """Write a random untied Llama. sizes: layers, hidden size, MLP size, vocabulary. No system uses the tokenizer."""
    config = dataclasses.replace(random_config(*sizes), tie_word_embeddings=False, max_position_embeddings=max_seq_len)
    directory.mkdir(parents=True)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": max_seq_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(settings, indent=2))
    shutil.copy(tokenizer_file, directory / "tokenizer.json")
    write_checkpoint(directory, directory, config, _WithNorms())
    return directory


class _WithNorms(RandomWeights):
    def bfloat16(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
        """Return random weights; norms are 1, which is 0x3f80 in bf16."""
        return super().bfloat16(name, shape) if len(shape) == 2 else np.full(shape, 0x3F80, np.uint16)
