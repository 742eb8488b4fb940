"""Random block drafters (DFlash, DFlash2, DSpark) in the published layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.checkpoints import write_safetensors

LAYOUTS = (
    "dflash",  # z-lab's first and SpecForge's: block_size at the top, rope_theta
    "dflash_nested",  # z-lab's since Qwen3.5: block_size in dflash_config, rope_parameters
    "dflash2",  # z-lab
    "dspark",  # DeepSpec: all keys at the top, an embedding and an LM head of its own
    "dspark_plain",  # DeepSpec's DFlash: the same without a Markov head
    "specforge_dspark",
    "speculators_dflash",
    "speculators_dspark",
)
_FLAT = ("dspark", "dspark_plain")
_RANK = 32


def make_block_drafter(
    directory: Path,
    target_dir: Path,
    layout: str = "dflash",
    *,
    layers: Sequence[int] = (1, 2),
    num_layers: int = 2,
    block_size: int = 4,
    windows: Sequence[int] = (),
    own_embedding: bool | None = None,
    seed: int = 0,
    spare: dict[str, np.ndarray] | None = None,
    without: Sequence[str] = (),
    block: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Write a drafter for a target's checkpoint; the same seed gives the same tensors in every layout.

    layers: of the target, entered. windows: by drafter layer, 0: full attention. own_embedding: with an embedding and
    an LM head; None: as the layout has it. block: overrides of the keys that say how blocks are drafted, overrides: of
    a decoder's keys; None removes one.
    """
    target = json.loads((target_dir / "config.json").read_text())
    own = _decoder_keys(target, layout, num_layers, windows) | overrides
    keys = _block_keys(layout, list(layers), block_size, target) | (block or {})
    config = _without_none(_config(layout, own, keys, target))
    if own_embedding is None:
        own_embedding = layout in _FLAT or layout.startswith("speculators")
    tensors = _tensors(own, keys, target["hidden_size"] * len(layers), own_embedding, seed) | (spare or {})
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    kept = {name: value for name, value in tensors.items() if name not in without}
    write_safetensors(directory, kept, "bfloat16")
    return directory


def _decoder_keys(target: dict[str, Any], layout: str, num_layers: int, windows: Sequence[int]) -> dict[str, Any]:
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    window = max(windows, default=0)
    kinds = ["sliding_attention" if w else "full_attention" for w in windows] or ["full_attention"] * num_layers
    found = {name: target[name] for name in sizes} | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 0,
        "head_dim": target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": kinds,
        "max_position_embeddings": 256,
        "max_window_layers": num_layers,
        "model_type": "qwen3",
        "num_hidden_layers": num_layers,
        "rms_norm_eps": 1e-6,
        "sliding_window": window or None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": bool(window),
    }
    if layout in ("dflash", "specforge_dspark", "dspark_plain"):
        return found | {"rope_theta": 10000.0, "rope_scaling": None}
    return found | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}


def _block_keys(layout: str, layers: list[int], block_size: int, target: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {"block_size": block_size, "mask_token_id": target["vocab_size"] - 2}
    if layout.startswith("speculators"):
        keys["aux_hidden_state_layer_ids"] = layers
        keys |= {"sample_from_anchor": layout.endswith("dspark"), "sliding_window_non_causal": False}
    else:
        keys["target_layer_ids"] = [layer - 1 for layer in layers]  # layers left, -1: the embedding
    if layout == "dflash2":
        keys |= {"conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": _RANK, "selector_top_k": 8}
        keys |= {"final_logit_softcapping": 5.0, "output_multiplier": 0.75}
    if layout.endswith("dspark"):
        keys |= {"markov_rank": _RANK, "markov_head_type": "vanilla"}
        keys |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    if layout == "specforge_dspark":
        keys |= {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    if layout in _FLAT:
        keys |= {"num_anchors": 512}
    if layout == "dspark_plain":
        keys |= {"markov_rank": 0, "enable_confidence_head": False}
    return keys


def _config(layout: str, own: dict[str, Any], keys: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """config.json with the keys where the layout has them."""
    num_target_layers = {"num_target_layers": target["num_hidden_layers"]}
    if layout.startswith("speculators"):
        kind = layout.removeprefix("speculators_")
        verifier = {"name_or_path": "target", "architectures": target["architectures"]}
        proposal = {"proposal_type": "greedy", "speculative_tokens": keys["block_size"] - 1}
        return {
            "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
            "draft_vocab_size": own["vocab_size"],
            "dtype": "bfloat16",
            "speculators_config": {"algorithm": kind, "proposal_methods": [proposal], "verifier": verifier},
            "speculators_model_type": kind,
            "speculators_version": "0.5.0",
            "tie_word_embeddings": False,
            "transformer_layer_config": own,
        } | keys
    if layout in _FLAT:
        return num_target_layers | own | keys | {"architectures": ["Qwen3DSparkModel"]}
    names = {"dflash2": "DFlash2DraftModel", "specforge_dspark": "DSparkDraftModel"}
    found = num_target_layers | own | {"architectures": [names.get(layout, "DFlashDraftModel")]}
    if layout in ("dflash", "specforge_dspark"):
        module = "dspark.DSparkDraftModel" if layout == "specforge_dspark" else "dflash.DFlashDraftModel"
        found |= {"auto_map": {"AutoModel": module}, "block_size": keys["block_size"]}
        keys = {name: value for name, value in keys.items() if name != "block_size"}
    if layout == "dflash2":
        found["is_causal"] = False
    return found | {"dflash_config": keys}


def _without_none(value: Any) -> Any:
    kept = ("rope_scaling", "sliding_window")  # which are published as null
    if not isinstance(value, dict):
        return value
    return {name: _without_none(item) for name, item in value.items() if item is not None or name in kept}


def _tensors(
    own: dict[str, Any], keys: dict[str, Any], num_features: int, own_embedding: bool, seed: int
) -> dict[str, np.ndarray]:
    hidden, inner, vocab, head_dim = (
        own[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    )
    q_size, kv_size = own["num_attention_heads"] * head_dim, own["num_key_value_heads"] * head_dim
    tensors: dict[str, np.ndarray] = {}

    def noise(name: str, shape: tuple[int, ...], scale: float, mean: float = 0.0) -> None:
        key = np.random.SeedSequence([seed, 7, *name.encode()])
        values = np.random.default_rng(key).standard_normal(shape, np.float32)
        tensors[name] = np.float32(mean) + values * np.float32(scale)

    def matrix(name: str, num_out: int, num_in: int, scale: float = 1.0) -> None:
        noise(f"{name}.weight", (num_out, num_in), scale * num_in**-0.5)

    matrix("fc", hidden, num_features)
    for name in ("hidden_norm", "norm"):
        noise(f"{name}.weight", (hidden,), 0.1, 1.0)
    for layer in (f"layers.{i}" for i in range(own["num_hidden_layers"])):
        for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            noise(f"{layer}.{name}.weight", (size,), 0.1, 1.0)
        for part, size, scale in (("q", q_size, 1.5), ("k", kv_size, 1.5), ("v", kv_size, 1.0)):
            matrix(f"{layer}.self_attn.{part}_proj", size, hidden, scale)
        matrix(f"{layer}.self_attn.o_proj", hidden, q_size)
        if own["attention_bias"]:
            for part, size in (("q", q_size), ("k", kv_size), ("v", kv_size), ("o", hidden)):
                noise(f"{layer}.self_attn.{part}_proj.bias", (size,), 0.2)
        for name in ("q_norm", "k_norm"):
            noise(f"{layer}.self_attn.{name}.weight", (head_dim,), 0.1, 1.0)
        for part, sizes in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            matrix(f"{layer}.mlp.{part}_proj", *sizes)
        if taps := keys.get("conv_kernel_size"):
            for conv in (f"{layer}.attention_conv", f"{layer}.mlp_conv"):
                noise(f"{conv}.base_kernel", (2, taps, hidden), 0.2)
                tensors[f"{conv}.base_kernel"][:, 0] += 1
                matrix(f"{conv}.kernel_projection", 2 * taps * hidden // keys["conv_group_size"], hidden, 0.3)
    if own_embedding:
        matrix("embed_tokens", vocab, hidden, 2.0)
        matrix("lm_head", vocab, hidden, 2.0)
    if rank := keys.get("markov_rank"):
        noise("markov_head.markov_w1.weight", (vocab, rank), 1.0)
        matrix("markov_head.markov_w2", vocab, rank)
    if keys.get("enable_confidence_head"):
        matrix("confidence_head.proj", 1, hidden + (keys.get("markov_rank") or 0))
        noise("confidence_head.proj.bias", (1,), 0.1)
    if rank := keys.get("selector_rank"):
        noise("candidate_selector.predecessor_codebook", (vocab, rank), rank**-0.5)
        noise("candidate_selector.successor_codebook", (vocab, rank), 1.0)
        matrix("candidate_selector.hidden_projection", rank, hidden)
    return tensors
