"""Tiny random mixtures of experts in Hugging Face format with a real tokenizer, as checkpoints.py has dense models.

A model of the same seed without experts shares its embedding, attention, norms and LM head with them, so that it drafts
for them as a related dense model does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.checkpoints import make_checkpoint, random_tensors, write_safetensors

FAMILIES = {"qwen3_moe": "qwen3", "mixtral": "llama", "gpt_oss": "llama"}
"""model_type -> the dense one whose attention it has, but for gpt-oss's sinks."""
_MXFP4_SHARE = 32  # values of a block


def make_moe_checkpoint(
    directory: Path,
    family: str = "qwen3_moe",
    *,
    num_experts: int = 8,
    top_k: int = 2,
    expert_size: int = 64,
    embedding_scale: float = 1.0,
    seed: int = 0,
    dtype: str = "bfloat16",
    sharded: bool = False,
    **options: Any,
) -> Path:
    """Write a random checkpoint and return its directory.

    embedding_scale: of make_checkpoint's; the larger, the less alike neighbors are routed. options: of
    make_checkpoint, for the attention, the vocabulary and further keys of config.json, which is in the family's
    published layout; gpt-oss's experts are in mxfp4.
    """
    family_keys = {
        "qwen3_moe": {
            "architectures": ["Qwen3MoeForCausalLM"],
            "moe_intermediate_size": expert_size,
            "num_experts": num_experts,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        "mixtral": {
            "architectures": ["MixtralForCausalLM"],
            "intermediate_size": expert_size,
            "num_local_experts": num_experts,
            "sliding_window": None,
        },
        "gpt_oss": {
            "architectures": ["GptOssForCausalLM"],
            "intermediate_size": expert_size,
            "num_local_experts": num_experts,
            "experts_per_token": top_k,
            "swiglu_limit": 7.0,
            "sliding_window": 16,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            },
        },
    }[family]
    if family == "gpt_oss":
        options = {"attention_bias": True, "head_dim": 16} | options
    make_checkpoint(directory, FAMILIES[family], seed=seed, dtype=dtype, **options)
    config = json.loads((directory / "config.json").read_text())
    tensors = {name: values for name, values in random_tensors(config, seed).items() if ".mlp." not in name}
    tensors["model.embed_tokens.weight"] *= np.float32(embedding_scale)
    config |= family_keys | {"model_type": family, "num_experts_per_tok": top_k}
    if family == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[i % 2] for i in range(config["num_hidden_layers"])]
    write = {"qwen3_moe": _qwen3_layer, "mixtral": _mixtral_layer, "gpt_oss": _gpt_oss_layer}[family]
    for i in range(config["num_hidden_layers"]):
        noise = _Noise(seed, i)
        tensors |= write(f"model.layers.{i}", noise, num_experts, config["hidden_size"], expert_size)
        if family == "gpt_oss":
            tensors[f"model.layers.{i}.self_attn.sinks"] = noise("sinks", (config["num_attention_heads"],), 1.0)
    write_safetensors(directory, tensors, dtype, num_shards=3 if sharded else 1)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


def make_moe_pair(
    directory: Path, family: str = "qwen3_moe", *, draft_layers: int = 1, **options: Any
) -> tuple[Path, Path]:
    """Write target/, a mixture, and draft/, a related dense model with its tokenizer -> (target_dir, draft_dir).

    options: of make_moe_checkpoint for the target; what says sizes other than layers, for both.
    """
    target = make_moe_checkpoint(directory / "target", family, **options)
    shared = {name: value for name, value in options.items() if name not in _OF_TARGET}
    draft = make_checkpoint(directory / "draft", FAMILIES[family], num_layers=draft_layers, **shared)
    return target, draft


_OF_TARGET = ("num_experts", "top_k", "expert_size", "embedding_scale", "num_layers", "sharded")


class _Noise:
    """fp32 noise of one layer, keyed by name."""

    def __init__(self, seed: int, layer: int) -> None:
        self._key = [seed, 11, layer]

    def __call__(self, name: str, shape: tuple[int, ...], scale: float) -> np.ndarray:
        rng = np.random.default_rng(np.random.SeedSequence([*self._key, *name.encode()]))
        found: np.ndarray = rng.standard_normal(shape, np.float32) * np.float32(scale)
        return found

    def matrix(self, name: str, num_out: int, num_in: int) -> np.ndarray:
        return self(name, (num_out, num_in), num_in**-0.5)


def _router(noise: _Noise, num_experts: int, hidden: int) -> np.ndarray:
    return noise("router", (num_experts, hidden), 2 * hidden**-0.5)


def _expert(noise: _Noise, index: int, hidden: int, inner: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """gate, up and down. Their sum of top_k outputs is as large as a dense MLP's: weights add up to 1."""
    gate, up = (noise.matrix(f"{part}{index}", inner, hidden) for part in ("gate", "up"))
    return gate, up, 2 * noise.matrix(f"down{index}", hidden, inner)


def _qwen3_layer(layer: str, noise: _Noise, num_experts: int, hidden: int, inner: int) -> dict[str, np.ndarray]:
    found = {f"{layer}.mlp.gate.weight": _router(noise, num_experts, hidden)}
    for i in range(num_experts):
        parts = zip(("gate", "up", "down"), _expert(noise, i, hidden, inner), strict=True)
        found |= {f"{layer}.mlp.experts.{i}.{part}_proj.weight": values for part, values in parts}
    return found


def _mixtral_layer(layer: str, noise: _Noise, num_experts: int, hidden: int, inner: int) -> dict[str, np.ndarray]:
    found = {f"{layer}.block_sparse_moe.gate.weight": _router(noise, num_experts, hidden)}
    for i in range(num_experts):
        parts = zip(("w1", "w3", "w2"), _expert(noise, i, hidden, inner), strict=True)
        found |= {f"{layer}.block_sparse_moe.experts.{i}.{part}.weight": values for part, values in parts}
    return found


def _gpt_oss_layer(layer: str, noise: _Noise, num_experts: int, hidden: int, inner: int) -> dict[str, np.ndarray]:
    """Rows of gate and up take turns, and each matrix is blocks of 32 values of four bits with a scale of eight."""
    experts = [_expert(noise, i, hidden, inner) for i in range(num_experts)]
    gate_up = np.stack([np.stack([gate, up], 1).reshape(2 * inner, hidden) for gate, up, _ in experts])
    down = np.stack([values for _, _, values in experts])
    found = {
        f"{layer}.mlp.router.weight": _router(noise, num_experts, hidden),
        f"{layer}.mlp.router.bias": noise("router_bias", (num_experts,), 0.2),
        f"{layer}.mlp.experts.gate_up_proj_bias": noise("gate_up_bias", (num_experts, 2 * inner), 0.2),
        f"{layer}.mlp.experts.down_proj_bias": noise("down_bias", (num_experts, hidden), 0.2),
    }
    for name, values in (("gate_up", gate_up), ("down", down)):
        blocks, scales = mxfp4(values)
        found |= {f"{layer}.mlp.experts.{name}_proj_blocks": blocks, f"{layer}.mlp.experts.{name}_proj_scales": scales}
    return found


def mxfp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [..., n] -> blocks [..., n / 32, 16] and scales [..., n / 32] uint8.

    Byte j of a block has the e2m1 values 2j (low half) and 2j + 1, which 2 ** (scale - 127) multiplies.
    """
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    parts = values.reshape(*values.shape[:-1], -1, _MXFP4_SHARE)
    exponents = np.floor(np.log2(np.maximum(np.abs(parts).max(-1), 1e-30))) - 2
    scaled = parts / np.exp2(exponents)[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - levels).argmin(-1).astype(np.uint8) | (scaled < 0).astype(np.uint8) << 3
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (exponents + 127).astype(np.uint8)
