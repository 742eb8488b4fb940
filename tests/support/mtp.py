"""Random checkpoints with an MTP layer, and the layer's published forward pass in torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.support.checkpoints import make_checkpoint

_PREFIX = "model.mtp_layers.0."


def make_mimo(directory: Path, **options: Any) -> Path:
    """MiMo's layout, with one MTP layer; options: of make_checkpoint."""
    return make_checkpoint(directory, "mimo", **{"num_nextn_predict_layers": 1, "attention_bias": True, **options})


class TorchMtp:
    """In fp32, as modeling_mimo.py has the layer (MiMoMTPLayers), and the roll over tokens as FastMTP's training."""

    def __init__(self, target_dir: Path, reads_normed: bool = False) -> None:
        self._reads_normed = reads_normed
        config = json.loads((target_dir / "config.json").read_text())
        self.config = {"draft_vocab_size": config["vocab_size"]}
        self._eps, self._num_heads = config["rms_norm_eps"], config["num_attention_heads"]
        self._num_kv_heads = config["num_key_value_heads"]
        self._head_dim = config.get("head_dim") or config["hidden_size"] // self._num_heads
        self._theta = config["rope_parameters"]["rope_theta"]
        with safe_open(target_dir / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        self._weights = {n.removeprefix(_PREFIX): t for n, t in tensors.items() if n.startswith(_PREFIX)}
        self._embedding, self._norm_of_target = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
        self._lm_head = tensors.get("lm_head.weight", self._embedding)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_tokens, hidden] that leaves the target's last layer -> what the layer reads of it."""
        return self._normed(hidden, self._norm_of_target) if self._reads_normed else hidden

    def forward(self, hidden: torch.Tensor, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [n, hidden], features or outputs, of positions 0 .. n - 1, token_ids of positions 1 .. n -> outputs
        [n, hidden], logits [n, vocab_size]. All rows at once: row i sees rows up to i."""
        w, n = self._weights, len(token_ids)
        embedded = self._normed(self._embedding[torch.tensor(token_ids)], w["token_layernorm.weight"])
        both = torch.cat((self._normed(hidden, w["hidden_layernorm.weight"]), embedded), -1)
        residual = both @ w["input_proj.weight"].T
        x = self._normed(residual, w["input_layernorm.weight"])
        q, k, v = (self._linear(f"self_attn.{part}_proj", x).view(n, -1, self._head_dim) for part in "qkv")
        pairs = torch.arange(0, self._head_dim, 2) / self._head_dim
        angles = torch.arange(n)[:, None] * self._theta**-pairs
        q, k = _rotated(q, angles), _rotated(k, angles)
        k, v = (t.repeat_interleave(self._num_heads // self._num_kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self._head_dim)
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        residual = residual + self._linear("self_attn.o_proj", attended)
        x = self._normed(residual, w["post_attention_layernorm.weight"])
        x = torch.nn.functional.silu(self._linear("mlp.gate_proj", x)) * self._linear("mlp.up_proj", x)
        outputs = self._normed(residual + self._linear("mlp.down_proj", x), w["final_layernorm.weight"])
        return outputs, outputs @ self._lm_head.T

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * weight

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
