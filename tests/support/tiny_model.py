"""Tiny random models: an engine file of one, and the same model in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from faser_trtllm.builder.engine_file import pack_matrix, pack_quantized, round_up, write_engine_file
from faser_trtllm.models.experts import CLAMPED, ExpertsConfig
from faser_trtllm.models.quantized_weight import MXFP4, Scheme, dequantize, quantize
from faser_trtllm.models.reference import routes
from lab.reference.quantized_weight import quantize_activations


@dataclass(frozen=True)
class TinyConfig:
    num_layers: int = 3
    hidden_size: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 160
    vocab_size: int = 100
    max_seq_len: int = 640
    windows: tuple[int, ...] = (0,)  # of the layers, again and again
    sinks: bool = False
    rms_norm_eps: float = 1e-5
    rope_attention_factor: float = 1.0
    rope_theta: float = 10000.0
    tied: bool = True
    biases: bool = False
    qk_norm: bool = False
    norms_all_heads: bool = False
    seed: int = 0
    quantization: str = "none"
    quantize_lm_head: bool = False
    experts: ExpertsConfig | None = None  # each of intermediate_size

    def window(self, layer: int) -> int:
        return self.windows[layer % len(self.windows)]

    @property
    def scheme(self) -> Scheme | None:
        scheme = Scheme.parse(self.quantization)
        return None if scheme is None else replace(scheme, lm_head=self.quantize_lm_head)

    @property
    def dense_scheme(self) -> Scheme | None:
        """The scheme of all weights except experts."""
        return None if self.scheme == MXFP4 else self.scheme


class TinyModel:
    """Weights rounded to bf16 or quantized (norms and biases fp32), as an engine file and as a torch forward pass."""

    def __init__(self, config: TinyConfig) -> None:
        self.config = c = config
        generator = torch.Generator().manual_seed(c.seed)
        qkv_size = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim

        head_scheme = c.scheme if c.quantize_lm_head else None

        def matrix(
            num_out: int, num_in: int, scale: float = 1.0, scheme: Scheme | None = c.dense_scheme
        ) -> torch.Tensor:
            weight = torch.randn(num_out, num_in, generator=generator) * scale / math.sqrt(num_in)
            weight = weight.bfloat16().float()
            return weight if scheme is None else torch.from_numpy(dequantize(quantize(weight.numpy(), scheme)))

        def vector(size: int, mean: float) -> torch.Tensor:
            return mean + 0.2 * torch.randn(size, generator=generator)

        half = c.head_dim // 2
        self.inv_freq = c.rope_theta ** -(torch.arange(half, dtype=torch.float32) / half)
        self.lm_head = matrix(c.vocab_size, c.hidden_size, 3.0, head_scheme)
        self.embedding = self.lm_head if c.tied else matrix(c.vocab_size, c.hidden_size, 3.0, None)
        self.final_norm = vector(c.hidden_size, 1.0)
        self.layers = []
        for _ in range(c.num_layers):
            layer = {
                "input_norm": vector(c.hidden_size, 1.0),
                "qkv": matrix(qkv_size, c.hidden_size, 1.5),
                "o": matrix(c.hidden_size, c.num_heads * c.head_dim),
                "post_norm": vector(c.hidden_size, 1.0),
            }
            for prefix, inner in self._mlps():
                # So that some values are beyond the bounds.
                scale = 4.0 if c.experts is not None and c.experts.activation == CLAMPED else 1.0
                its_scheme = c.dense_scheme if prefix == "shared_" else c.scheme
                layer[f"{prefix}gate"] = matrix(inner, c.hidden_size, scale, its_scheme)
                layer[f"{prefix}up"] = matrix(inner, c.hidden_size, scale, its_scheme)
                layer[f"{prefix}down"] = matrix(c.hidden_size, inner, 1.0, its_scheme)
            if c.experts is not None:
                layer["router"] = matrix(c.experts.num_experts, c.hidden_size, 2.0, None)
                layer["shared_switch"] = matrix(1, c.hidden_size, 1.0, None)
                if c.experts.has_bias:
                    names = [f"{prefix}{name}" for prefix, _ in self._mlps() for name in ("gate", "up", "down")]
                    layer |= {f"{name}_bias": vector(len(layer[name]), 0.0) for name in (*names, "router")}
            if c.biases:
                sizes = {"qkv": qkv_size, "o": c.hidden_size}
                if c.experts is None:
                    sizes |= {"down": c.hidden_size, "gate": c.intermediate_size, "up": c.intermediate_size}
                layer |= {f"{name}_bias": vector(size, 0.0) for name, size in sizes.items()}
            if c.qk_norm:
                of_q, of_k = (c.num_heads, c.num_kv_heads) if c.norms_all_heads else (1, 1)
                layer |= {"q_norm": vector(of_q * c.head_dim, 1.0), "k_norm": vector(of_k * c.head_dim, 1.0)}
            if c.sinks:  # as large as the scores
                layer["sinks"] = vector(c.num_heads, 1.0)
            self.layers.append(layer)

    def _mlps(self) -> list[tuple[str, int]]:
        """Return for each MLP of a layer the prefix of its matrices' names, and its width."""
        experts = self.config.experts
        if experts is None:
            return [("", self.config.intermediate_size)]
        found = [(f"{i}_", self.config.intermediate_size) for i in range(experts.num_experts)]
        return [*found, ("shared_", experts.shared_size)] if experts.shared_size else found

    def write(self, path: Path, segments: list[int] | None = None) -> Path:
        c = self.config
        names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        names += (
            "vocab_size",
            "max_seq_len",
            "rms_norm_eps",
            "rope_attention_factor",
            "tied",
        )
        tensors = {
            "rope_inv_freq": self.inv_freq.numpy(),
            "final_norm": self.final_norm.numpy(),
        } | _packed("lm_head", self.lm_head, c.scheme if c.quantize_lm_head else None)
        if not c.tied:
            tensors["embedding"] = _bf16_bits(self.embedding)
        for i, layer in enumerate(self.layers):
            packed = {name: layer[name].numpy() for name in _VECTORS if name in layer}
            for name in ("qkv", "o"):
                packed |= _packed(name, layer[name], c.dense_scheme)
            if c.experts is None:
                packed |= _packed_mlp(layer, "", c.scheme, c.biases)
            else:
                mlps = [_packed_mlp(layer, f"{e}_", c.scheme, c.experts.has_bias) for e in range(c.experts.num_experts)]
                packed |= {f"expert_{name}": np.concatenate([mlp[name] for mlp in mlps]) for name in mlps[0]}
                packed |= _packed("router", layer["router"], None)
            if c.experts is not None and c.experts.shared_size:
                shared = _packed_mlp(layer, "shared_", c.dense_scheme, False)
                packed |= {f"shared_{name}": array for name, array in shared.items()}
                packed |= _packed("shared_gate", layer["shared_switch"], None)
            tensors |= {f"layers.{i}.{name}": array for name, array in packed.items()}
        model = {name: getattr(c, name) for name in names}
        model |= {"windows": [c.window(i) for i in range(c.num_layers)], "has_sinks": c.sinks}
        model["norms_all_heads"] = c.norms_all_heads
        if c.experts is not None:
            model["experts"] = c.experts.sizes()
        write_engine_file(path, model, segments or [0, c.num_layers], tensors.items(), scheme=c.scheme)
        return path

    def logits(self, token_ids: list[int], rounded: bool = False) -> torch.Tensor:
        """Logits [num_tokens, vocab_size] of a whole sequence, in float32; rounded: as in run()."""
        return self.run(token_ids, rounded)[0]

    def run(self, token_ids: list[int], rounded: bool = True) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [num_tokens, vocab_size] of a whole sequence, in fp32, and each layer's experts [num_tokens, top_k].

        rounded: round to bf16 where the engine does (inputs of matrices, keys, values and probabilities; the
        latter as the engine rounds them in contexts of up to 256 tokens), so that little is left to differ.
        """
        c = self.config
        cast = (lambda x: x.bfloat16().float()) if rounded else (lambda x: x)
        scheme = c.scheme

        def inputs(x: torch.Tensor) -> torch.Tensor:
            if scheme is None or scheme.activation_bits == 16:
                return cast(x)
            return torch.from_numpy(quantize_activations(cast(x).numpy(), scheme.group_size))

        num_tokens = len(token_ids)
        positions = torch.arange(num_tokens, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq
        cos, sin = angles.cos() * c.rope_attention_factor, angles.sin() * c.rope_attention_factor
        distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
        group = c.num_heads // c.num_kv_heads
        h = self.embedding[torch.tensor(token_ids)]
        found: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            unseen = (distance < 0) | (distance >= (c.window(index) or num_tokens))
            x = inputs(self._norm(h, layer["input_norm"]))
            qkv = _linear(x, layer, "qkv").view(num_tokens, -1, c.head_dim)
            q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
            if c.qk_norm:
                parts = zip((q, k), ("q_norm", "k_norm"), strict=True)
                rows = [(x.flatten(1) if c.norms_all_heads else x, layer[name], x.shape) for x, name in parts]
                q, k = (self._norm(x, weight).view(shape) for x, weight, shape in rows)
            q, k, v = cast(_rotate(q, cos, sin)), cast(_rotate(k, cos, sin)), cast(v)
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(c.head_dim)
            scores = scores.masked_fill(unseen, -torch.inf)
            sinks = layer["sinks"] if c.sinks else torch.full((c.num_heads,), -torch.inf)
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, num_tokens, 1)), -1)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            seen = cast(weights)[..., :num_tokens]
            attended = torch.einsum("hqk,khd->hqd", seen, v) / weights.sum(-1, keepdim=True)
            attended = attended.transpose(0, 1).reshape(num_tokens, -1)
            h = h + _linear(inputs(attended), layer, "o")
            x = self._norm(h, layer["post_norm"])
            if c.experts is None:
                h = h + self._mlp(x, layer, "", inputs)
                continue
            chosen, weights = routes(c.experts, _linear(cast(x), layer, "router"))
            found.append(chosen)
            for expert in range(c.experts.num_experts):
                rows, places = (chosen == expert).nonzero(as_tuple=True)
                h[rows] += weights[rows, places, None] * self._mlp(x[rows], layer, f"{expert}_", inputs)
            if c.experts.shared_size:
                h = h + _linear(cast(x), layer, "shared_switch").sigmoid() * self._mlp(x, layer, "shared_", inputs)
        last = self._norm(h, self.final_norm)
        return (inputs(last) if c.quantize_lm_head else cast(last)) @ self.lm_head.T, found

    def _mlp(
        self,
        x: torch.Tensor,
        layer: dict[str, torch.Tensor],
        prefix: str,
        inputs: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        x = inputs(x)
        gate, up = _linear(x, layer, f"{prefix}gate"), _linear(x, layer, f"{prefix}up")
        if self.config.experts is not None and self.config.experts.activation == CLAMPED:
            gate = gate.clamp(max=7)
            x = (up.clamp(-7, 7) + 1) * gate * (1.702 * gate).sigmoid()
        else:
            x = torch.nn.functional.silu(gate) * up
        return _linear(inputs(x), layer, f"{prefix}down")

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight


_VECTORS = ("input_norm", "post_norm", "q_norm", "k_norm", "qkv_bias", "o_bias", "router_bias", "sinks")


def _packed_mlp(
    layer: dict[str, torch.Tensor], prefix: str, scheme: Scheme | None, has_bias: bool
) -> dict[str, np.ndarray]:
    """gate_up and down, whose biases are padded to whole panels where an expert's follow each other."""

    def padded(name: str) -> torch.Tensor:
        value = layer[f"{prefix}{name}"]
        return torch.cat([value, torch.zeros(round_up(len(value), 64) - len(value), *value.shape[1:])])

    packed = _packed("gate_up", torch.cat([padded("gate"), padded("up")]), scheme)
    packed |= _packed("down", layer[f"{prefix}down"], scheme)
    if has_bias:
        packed["gate_up_bias"] = torch.cat([padded("gate_bias"), padded("up_bias")]).numpy()
        packed["down_bias"] = (padded("down_bias") if prefix else layer["down_bias"]).numpy()
    return packed


def _packed(name: str, weight: torch.Tensor, scheme: Scheme | None) -> dict[str, np.ndarray]:
    if scheme is None:
        return {name: pack_matrix(_bf16_bits(weight))}
    words, scales = pack_quantized(quantize(weight.numpy(), scheme))
    return {name: words, f"{name}_scales": scales}


def _linear(x: torch.Tensor, layer: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return torch.nn.functional.linear(x, layer[name], layer.get(f"{name}_bias"))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _bf16_bits(x: torch.Tensor) -> np.ndarray:
    return x.bfloat16().view(torch.int16).numpy().view(np.uint16)
