"""Random EAGLE-3 heads in the published layouts, and the published forward pass in torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from tests.support.checkpoints import write_safetensors

EPS = 1e-6


def make_head(
    directory: Path,
    target_dir: Path,
    *,
    naming: str = "midlayer",
    prefix: str = "",
    layers: tuple[int, ...] = (0, 1, 2),
    draft_vocab_size: int | None = 96,
    own_embedding: bool = True,
    seed: int = 0,
    spare: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    **overrides: Any,
) -> Path:
    """Write a head for a target's checkpoint; naming: "midlayer" (SafeAILab) or "layers.0" (SpecForge, vLLM).

    draft_vocab_size None: the target's, without d2t. overrides: keys of config.json, None removes one.
    """
    target = json.loads((target_dir / "config.json").read_text())
    hidden, inner, vocab = target["hidden_size"], target["intermediate_size"], target["vocab_size"]
    num_heads, num_kv_heads = target["num_attention_heads"], target["num_key_value_heads"]
    head_dim = target.get("head_dim") or hidden // num_heads
    rng = np.random.default_rng(seed)
    num_outputs = draft_vocab_size or vocab

    def matrix(num_out: int, num_in: int, scale: float = 1.0) -> np.ndarray:
        values = rng.standard_normal((num_out, num_in), np.float32) * np.float32(scale * num_in**-0.5)
        return torch.from_numpy(values).bfloat16().float().numpy()

    def norm() -> np.ndarray:
        values = (1 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)
        return torch.from_numpy(values).bfloat16().float().numpy()

    tensors = {
        "fc.weight": matrix(hidden, len(layers) * hidden),
        f"{naming}.self_attn.q_proj.weight": matrix(num_heads * head_dim, 2 * hidden, 1.5),
        f"{naming}.self_attn.k_proj.weight": matrix(num_kv_heads * head_dim, 2 * hidden, 1.5),
        f"{naming}.self_attn.v_proj.weight": matrix(num_kv_heads * head_dim, 2 * hidden),
        f"{naming}.self_attn.o_proj.weight": matrix(hidden, num_heads * head_dim),
        f"{naming}.mlp.gate_proj.weight": matrix(inner, hidden),
        f"{naming}.mlp.up_proj.weight": matrix(inner, hidden),
        f"{naming}.mlp.down_proj.weight": matrix(hidden, inner),
        f"{naming}.input_layernorm.weight": norm(),
        f"{naming}.hidden_norm.weight": norm(),
        f"{naming}.post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": matrix(num_outputs, hidden, 3.0),
    }
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(vocab, hidden, 2.0)
    if draft_vocab_size is not None:
        ids = np.sort(rng.choice(vocab, draft_vocab_size, replace=False))
        tensors["d2t"] = (ids - np.arange(draft_vocab_size)).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(vocab), ids)
    tensors |= spare or {}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "draft_vocab_size": num_outputs,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32,
        "eagle_aux_hidden_state_layer_ids": list(layers),
    } | overrides
    if target.get("head_dim"):
        config["head_dim"] = head_dim
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None}, indent=2)
    )
    at_top = ("lm_head", "d2t", "t2d", "fc")
    renamed = {name if name.startswith(at_top) else prefix + name: value for name, value in tensors.items()}
    kept = {name: value for name, value in renamed.items() if name not in without}
    write_safetensors(directory, kept, "bfloat16")
    return directory


def torch_head(head_dir: Path, target_dir: Path) -> TorchHead:
    """The head of a checkpoint, with the target's embedding where it has none."""
    with safe_open(target_dir / "model.safetensors", "pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight").float()
    with safe_open(head_dir / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return TorchHead(tensors, json.loads((head_dir / "config.json").read_text()), embedding)


class TorchHead:
    """The head's forward pass in fp32, as SafeAILab/EAGLE eagle/model/cnets.py has it."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], embedding: torch.Tensor) -> None:
        self.config = config
        self.weights: dict[str, torch.Tensor] = {}
        for name, value in tensors.items():
            short = name.removeprefix("model.").replace("midlayer.", "").replace("layers.0.", "")
            self.weights[short] = value.float() if value.is_floating_point() else value
        self.embedding = self.weights.get("embed_tokens.weight", embedding)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weights[f"{name}.weight"]

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_tokens, layers * hidden] of the target -> [num_tokens, hidden]."""
        return torch.nn.functional.linear(hidden, self.weights["fc.weight"], self.weights.get("fc.bias"))

    def forward(self, features: torch.Tensor, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """features [n, hidden] of positions 0 .. n - 1, token_ids of positions 1 .. n -> outputs [n, hidden], logits
        [n, vocab_size] over the target's vocabulary. All rows at once: row i sees rows up to i."""
        c, w = self.config, self.weights
        n, num_heads, num_kv_heads = len(token_ids), c["num_attention_heads"], c["num_key_value_heads"]
        head_dim = c.get("head_dim") or c["hidden_size"] // num_heads
        normed = self._norm(features, "hidden_norm")
        x = torch.cat((self._norm(self.embedding[torch.tensor(token_ids)], "input_layernorm"), normed), -1)
        residual = normed if c.get("norm_before_residual") else features
        q = torch.nn.functional.linear(x, w["self_attn.q_proj.weight"]).view(n, num_heads, head_dim)
        k = torch.nn.functional.linear(x, w["self_attn.k_proj.weight"]).view(n, num_kv_heads, head_dim)
        v = torch.nn.functional.linear(x, w["self_attn.v_proj.weight"]).view(n, num_kv_heads, head_dim)
        angles = torch.arange(n)[:, None] * c["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        q, k = _rotate(q, angles), _rotate(k, angles)
        k, v = (t.repeat_interleave(num_heads // num_kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        h = residual + torch.nn.functional.linear(attended, w["self_attn.o_proj.weight"])
        x = self._norm(h, "post_attention_layernorm")
        x = torch.nn.functional.silu(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)
        h = h + x @ w["mlp.down_proj.weight"].T
        found = self._norm(h, "norm") @ w["lm_head.weight"].T
        if "d2t" not in w:
            return h, found
        logits = torch.full((n, c["vocab_size"]), -torch.inf)
        logits[:, torch.arange(found.shape[1]) + w["d2t"]] = found
        return h, logits


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
