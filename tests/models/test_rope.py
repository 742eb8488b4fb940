from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from faser_trtllm.models.config import parse_model_config
from faser_trtllm.models.rope import RopeConfig, rope_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192},
        LLAMA3 | {"rope_theta": 10000.0, "original_max_position_embeddings": 64},
        YARN | {"rope_theta": 1000000.0, "original_max_position_embeddings": 32768},
        YARN | {"rope_theta": 10000.0, "original_max_position_embeddings": 512, "truncate": False},
        YARN | {"rope_theta": 10000.0, "original_max_position_embeddings": 512, "attention_factor": 0.7},
        YARN
        | {
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    data = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 2 * head_dim,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 131072,
        "rope_parameters": rope,
    }
    from transformers import LlamaConfig  # here, since every worker collects this file
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(LlamaConfig(**data))
    inv_freq, factor = rope_frequencies(parse_model_config(data).rope, head_dim)
    assert inv_freq.dtype == np.float32
    assert inv_freq.shape == (head_dim // 2,)
    np.testing.assert_allclose(inv_freq, theirs.inv_freq.numpy(), rtol=5e-7)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_unknown_types_are_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="longrope"):
        rope_frequencies(RopeConfig("longrope"), 16)
