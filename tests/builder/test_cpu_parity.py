"""The whole way from a checkpoint to the CPU engine's logits, against transformers in fp32."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser_trtllm.builder.build import BuildOptions, build_engines
from tests.support.checkpoints import LLAMA3_ROPE, YARN_ROPE, make_checkpoint
from tests.support.engine_logits import NUM_TOKENS, engine_logits
from tests.support.published_mixtures import GPT_OSS_ROPE, pack_experts, publish

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie": True, "spelling": "v4"}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-sizes": ("llama", {"vocab_size": 333, "intermediate_size": 100, "tokenizer_vocab_size": 320}),
    "llama-head-80": ("llama", {"head_dim": 80, "num_kv_heads": 1}),
    "llama-hidden-72": ("llama", {"hidden_size": 72, "num_kv_heads": 4}),
    "llama-linear": ("llama", {"rope": {"rope_type": "linear", "factor": 2.0}}),
    "llama3": ("llama", {"rope": LLAMA3_ROPE, "spelling": "v4"}),
    "llama-yarn": ("llama", {"rope": YARN_ROPE}),
    "llama-float32": ("llama", {"dtype": "float32", "sharded": True}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie": True, "num_kv_heads": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    architecture, options = CASES[case]
    directory = make_checkpoint(tmp_path / "checkpoint", architecture, num_layers=3, **options)
    engines = build_engines(BuildOptions(directory, None, tmp_path / "engines", exit_layers=(1,)))
    assert engines is not None
    from transformers import AutoModelForCausalLM  # here, since every worker collects this file

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    token_ids, expected = logits_of(model, options.get("vocab_size", 320))
    error = np.abs(engine_logits(engines.target_path, token_ids) - expected)
    # bf16 has 8 bits: activations and KV rounded to it give about 1% of error, a wrong formula far more.
    assert np.sqrt((error**2).mean()) < 0.02 * expected.std()
    assert error.max() < 0.1 * expected.std()


def logits_of(model: Any, vocab_size: int = 320) -> tuple[list[int], np.ndarray]:
    """Random tokens and transformers' logits [tokens, vocab_size]."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=generator).tolist()
    with torch.no_grad():
        return token_ids, model(torch.tensor([token_ids])).logits[0].float().numpy()


def median_error(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.median(np.sqrt(np.square(logits - expected).mean(-1)) / expected.std()))


def test_olmoe(tmp_path: Path) -> None:
    """Closer to transformers in fp32 than transformers in bf16 is, and far from norms of single heads."""
    directory = tmp_path / "checkpoint"
    model = publish(directory, "olmoe", dtype="bfloat16", num_hidden_layers=4)
    engines = build_engines(BuildOptions(directory, None, tmp_path / "engines"))
    assert engines is not None
    token_ids, expected = logits_of(model)
    found = engine_logits(engines.target_path, token_ids)
    assert median_error(found, expected) < median_error(logits_of(copy.deepcopy(model).bfloat16())[1], expected)
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.forward = functools.partial(norm_heads, norm)
    assert median_error(found, logits_of(model)[1]) > 0.1


def norm_heads(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Norm each head alone, as Qwen3 does, with the weights of a norm of all heads."""
    heads = x.unflatten(-1, (-1, 16))
    return (heads * heads.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()).flatten(-2) * norm.weight


@pytest.mark.parametrize("quantization", ["none", "mxfp4"])
def test_gpt_oss(tmp_path: Path, quantization: str) -> None:
    """Closer to transformers in fp32 than transformers in bf16 is, and far from what it is not."""
    directory = tmp_path / "checkpoint"
    model = publish(directory, "gpt_oss", dtype="bfloat16", num_hidden_layers=4, rope_parameters=GPT_OSS_ROPE)
    pack_experts(directory, model)
    engines = build_engines(BuildOptions(directory, None, tmp_path / "engines", quantization=quantization))
    assert engines is not None
    token_ids, expected = logits_of(model)
    found = engine_logits(engines.target_path, token_ids)
    assert median_error(found, expected) < median_error(logits_of(copy.deepcopy(model).bfloat16())[1], expected)
    others = [copy.deepcopy(model) for _ in range(3)]
    for layer in others[0].model.layers:
        layer.self_attn.sinks.data.fill_(-100.0)  # as if there were none
    others[1].config.layer_types.reverse()
    others[2].config.sliding_window += 1
    for other in others:
        assert median_error(found, logits_of(other)[1]) > 0.1


def test_expansion_keeps_the_logits_bit_for_bit(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "checkpoint", attention_bias=True, mlp_bias=True)
    token_ids = list(range(5, 5 + NUM_TOKENS))
    logits = []
    for expand in (1, 3):
        engines = build_engines(BuildOptions(directory, None, tmp_path / f"engines{expand}", expand=expand))
        assert engines is not None
        logits.append(engine_logits(engines.target_path, token_ids))
    np.testing.assert_array_equal(*logits)
