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
    num_layers: int = 1,
    draft_vocab_size: int | None = 96,
    own_embedding: bool = True,
    qk_norm: bool = False,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    seed: int = 0,
    spare: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    **overrides: Any,
) -> Path:
    """Write a head for a target's checkpoint; naming: "midlayer" (SafeAILab) or "layers.0" (SpecForge, vLLM).

    num_layers: of the head; those after the first are named layers.1 and so on. draft_vocab_size None: the target's,
    without d2t. fc_norm, norm_before_fc: keys of config.json whose norms are written. overrides: other keys, None
    removes one.
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

    def norm(size: int = hidden, spread: float = 0.1) -> np.ndarray:
        values = (1 + spread * rng.standard_normal(size)).astype(np.float32)
        return torch.from_numpy(values).bfloat16().float().numpy()

    def layer(name: str, num_in: int) -> dict[str, np.ndarray]:
        found = {
            "self_attn.q_proj": matrix(num_heads * head_dim, num_in, 1.5),
            "self_attn.k_proj": matrix(num_kv_heads * head_dim, num_in, 1.5),
            "self_attn.v_proj": matrix(num_kv_heads * head_dim, num_in),
            "self_attn.o_proj": matrix(hidden, num_heads * head_dim),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
            "input_layernorm": norm(),
        }
        if num_in > hidden:
            found["hidden_norm"] = norm()
        found["post_attention_layernorm"] = norm()
        if qk_norm:
            found |= {f"self_attn.{part}_norm": norm(head_dim, 0.5) for part in "qk"}
        return {f"{name}.{part}.weight": value for part, value in found.items()}

    tensors = {"fc.weight": matrix(hidden, len(layers) * hidden)} | layer(naming, 2 * hidden)
    tensors |= {"norm.weight": norm(), "lm_head.weight": matrix(num_outputs, hidden, 3.0)}
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(vocab, hidden, 2.0)
    if draft_vocab_size is not None:
        ids = np.sort(rng.choice(vocab, draft_vocab_size, replace=False))
        tensors["d2t"] = (ids - np.arange(draft_vocab_size)).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(vocab), ids)
    for i in range(1, num_layers):
        tensors |= layer(f"layers.{i}", hidden)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": norm(spread=0.5) for i in range(len(layers))}
    if norm_before_fc:
        tensors["input_norm.weight"] = norm(len(layers) * hidden, 0.5)
    tensors |= spare or {}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": num_layers,
        "vocab_size": vocab,
        "draft_vocab_size": num_outputs,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32,
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }
    config |= {"fc_norm": True} if fc_norm else {}
    config |= {"norm_before_fc": True} if norm_before_fc else {}
    config |= overrides
    if target.get("head_dim"):
        config["head_dim"] = head_dim
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None}, indent=2)
    )
    at_top = ("lm_head", "d2t", "t2d", "fc.")
    renamed = {name if name.startswith(at_top) else prefix + name: value for name, value in tensors.items()}
    kept = {name: value for name, value in renamed.items() if name not in without}
    write_safetensors(directory, kept, "bfloat16")
    return directory


def make_speculators_head(directory: Path, target_dir: Path, **options: Any) -> Path:
    """Write a head as speculators does: its layers' configuration is nested, positions are counted from 1."""
    make_head(directory, target_dir, naming="layers.0", **options)
    layer = json.loads((directory / "config.json").read_text())
    of_head = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "fc_norm", "norm_before_fc")
    of_head += ("norm_output", "norm_before_residual")
    config = {name: layer.pop(name) for name in of_head if name in layer}
    config |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    del layer["architectures"]
    (directory / "config.json").write_text(json.dumps(config | {"transformer_layer_config": layer}, indent=2))
    return directory


def make_deepspec_head(directory: Path, target_dir: Path, *, layers: tuple[int, ...], **options: Any) -> Path:
    """Write a head as DeepSpec does: a copy of a Qwen3 target's configuration, layers left (-1: the embedding), norms
    of queries and keys, and own embedding and LM head of the whole vocabulary."""
    return make_head(
        directory,
        target_dir,
        naming="layers.0",
        layers=layers,
        qk_norm=True,
        draft_vocab_size=None,
        **{
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "layer_types": ["full_attention"],
            "target_layer_ids": [layer - 1 for layer in layers],
            "eagle_aux_hidden_state_layer_ids": None,
            "ttt_length": 7,
        }
        | options,
    )


def torch_head(head_dir: Path, target_dir: Path, feeds_normed: bool | None = None) -> TorchHead:
    """The head of a checkpoint, with the target's embedding where it has none. feeds_normed: what norm_output of its
    config.json means, where it is set; None: that the final norm's output is fed."""
    with safe_open(target_dir / "model.safetensors", "pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight").float()
    with safe_open(head_dir / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = json.loads((head_dir / "config.json").read_text())
    head = TorchHead(tensors, config | config.get("transformer_layer_config", {}), embedding)
    head.feeds_normed = bool(config.get("norm_output")) if feeds_normed is None else feeds_normed
    return head


class TorchHead:
    """The head's forward pass in fp32, as SafeAILab/EAGLE eagle/model/cnets.py has it, and what EAGLE-3.1, speculators
    and vLLM have besides. feeds_normed: outputs are after the final norm."""

    feeds_normed = False

    def __init__(self, tensors: dict[str, torch.Tensor], config: dict[str, Any], embedding: torch.Tensor) -> None:
        self.config = {"draft_vocab_size": config["vocab_size"]} | config
        self.weights: dict[str, torch.Tensor] = {}
        for name, value in tensors.items():
            short = name.removeprefix("model.").replace("midlayer.", "layers.0.")
            self.weights[short] = value.float() if value.is_floating_point() else value
        self.embedding = self.weights.get("embed_tokens.weight", embedding)

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_tokens, layers * hidden] of the target -> [num_tokens, hidden]."""
        norms = [name.removesuffix(".weight") for name in self.weights if name.startswith("fc_norm.")]
        if "input_norm.weight" in self.weights:
            hidden = self._norm(hidden, "input_norm")
        elif norms:
            parts = hidden.chunk(len(norms), -1)
            hidden = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return torch.nn.functional.linear(hidden, self.weights["fc.weight"], self.weights.get("fc.bias"))

    def forward(self, features: torch.Tensor, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """features [n, hidden] of positions 0 .. n - 1, token_ids of positions 1 .. n -> outputs [n, hidden], logits
        [n, vocab_size] over the target's vocabulary. All rows at once: row i sees rows up to i."""
        c, w, n = self.config, self.weights, len(token_ids)
        normed = self._norm(features, "layers.0.hidden_norm")
        x = torch.cat((self._norm(self.embedding[torch.tensor(token_ids)], "layers.0.input_layernorm"), normed), -1)
        h = self._layer("layers.0", x, normed if c.get("norm_before_residual") else features)
        for i in range(1, c.get("num_hidden_layers", 1)):
            h = self._layer(f"layers.{i}", self._norm(h, f"layers.{i}.input_layernorm"), h)
        outputs = self._norm(h, "norm")
        found = outputs @ w["lm_head.weight"].T
        logits = torch.full((n, c["vocab_size"]), -torch.inf)
        logits[:, torch.arange(found.shape[1]) + w.get("d2t", 0)] = found
        return outputs if self.feeds_normed else h, logits

    def _layer(self, name: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """A decoder's layer, from the input of its q, k and v on."""
        c, n = self.config, x.shape[0]
        num_heads, num_kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        head_dim = c.get("head_dim") or c["hidden_size"] // num_heads

        def product(part: str, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weights[f"{name}.{part}.weight"])

        q, k, v = (product(f"self_attn.{part}_proj", x).view(n, -1, head_dim) for part in "qkv")
        if f"{name}.self_attn.q_norm.weight" in self.weights:
            q, k = self._norm(q, f"{name}.self_attn.q_norm"), self._norm(k, f"{name}.self_attn.k_norm")
        positions = torch.arange(n)[:, None] + ("speculators_model_type" in c)
        angles = positions * c["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
        q, k = _rotate(q, angles), _rotate(k, angles)
        k, v = (t.repeat_interleave(num_heads // num_kv_heads, 1) for t in (k, v))
        kinds = dict(enumerate(c.get("layer_types", ())))
        window = c["sliding_window"] if kinds.get(int(name.split(".")[1])) == "sliding_attention" else n
        hidden_from = torch.ones(n, n).triu(1) + torch.ones(n, n).tril(-window)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
        scores = scores.masked_fill(hidden_from.bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        h = residual + product("self_attn.o_proj", attended)
        x = self._norm(h, f"{name}.post_attention_layernorm")
        return h + product(
            "mlp.down_proj", torch.nn.functional.silu(product("mlp.gate_proj", x)) * product("mlp.up_proj", x)
        )

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weights[f"{name}.weight"]


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
