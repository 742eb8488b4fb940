"""Tiny random models: an engine file of one, and the same model in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from faser_trtllm.builder.engine_file import pack_matrix, pack_quantized, round_up, write_engine_file
from faser_trtllm.models.quantized_weight import Scheme, dequantize, quantize, quantize_activations


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
    sliding_window: int = 0
    rms_norm_eps: float = 1e-5
    rope_attention_factor: float = 1.0
    rope_theta: float = 10000.0
    tied: bool = True
    biases: bool = False
    qk_norm: bool = False
    seed: int = 0
    quantization: str = "none"
    quantize_lm_head: bool = False

    @property
    def scheme(self) -> Scheme | None:
        scheme = Scheme.parse(self.quantization)
        return None if scheme is None else replace(scheme, lm_head=self.quantize_lm_head)


class TinyModel:
    """Weights rounded to bf16 or quantised (norms and biases fp32), as an engine file and as a torch forward pass."""

    def __init__(self, config: TinyConfig) -> None:
        self.config = c = config
        generator = torch.Generator().manual_seed(c.seed)
        qkv_size = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim

        scheme = c.scheme
        head_scheme = scheme if c.quantize_lm_head else None

        def matrix(num_out: int, num_in: int, scale: float = 1.0, scheme: Scheme | None = scheme) -> torch.Tensor:
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
                "gate": matrix(c.intermediate_size, c.hidden_size),
                "up": matrix(c.intermediate_size, c.hidden_size),
                "down": matrix(c.hidden_size, c.intermediate_size),
            }
            if c.biases:
                sizes = {"qkv": qkv_size, "o": c.hidden_size, "down": c.hidden_size}
                sizes |= {"gate": c.intermediate_size, "up": c.intermediate_size}
                layer |= {f"{name}_bias": vector(size, 0.0) for name, size in sizes.items()}
            if c.qk_norm:
                layer |= {"q_norm": vector(c.head_dim, 1.0), "k_norm": vector(c.head_dim, 1.0)}
            self.layers.append(layer)

    def write(self, path: Path, segments: list[int] | None = None) -> Path:
        c = self.config
        names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        names += (
            "vocab_size",
            "max_seq_len",
            "sliding_window",
            "rms_norm_eps",
            "rope_attention_factor",
            "tied",
        )
        padded = round_up(c.intermediate_size, 64)

        def two_parts(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            whole = torch.zeros(2 * padded, *gate.shape[1:])
            whole[: c.intermediate_size] = gate
            whole[padded : padded + c.intermediate_size] = up
            return whole

        tensors = {
            "rope_inv_freq": self.inv_freq.numpy(),
            "final_norm": self.final_norm.numpy(),
        } | _packed("lm_head", self.lm_head, c.scheme if c.quantize_lm_head else None)
        if not c.tied:
            tensors["embedding"] = _bf16_bits(self.embedding)
        for i, layer in enumerate(self.layers):
            packed = _packed("gate_up", two_parts(layer["gate"], layer["up"]), c.scheme)
            for name in ("qkv", "o", "down"):
                packed |= _packed(name, layer[name], c.scheme)
            if c.biases:
                packed["gate_up_bias"] = two_parts(layer["gate_bias"], layer["up_bias"]).numpy()
            for name, value in layer.items():
                if value.ndim == 1 and name not in ("gate_bias", "up_bias"):
                    packed[name] = value.numpy()
            tensors |= {f"layers.{i}.{name}": array for name, array in packed.items()}
        model = {name: getattr(c, name) for name in names}
        write_engine_file(path, model, segments or [0, c.num_layers], tensors.items(), scheme=c.scheme)
        return path

    def logits(self, token_ids: list[int], rounded: bool = False) -> torch.Tensor:
        """Logits [num_tokens, vocab_size] of a whole sequence, in float32.

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
        unseen = distance < 0
        if c.sliding_window:
            unseen |= distance >= c.sliding_window
        mask = torch.zeros(num_tokens, num_tokens).masked_fill(unseen, -torch.inf)
        group = c.num_heads // c.num_kv_heads
        h = self.embedding[torch.tensor(token_ids)]
        for layer in self.layers:
            x = inputs(self._norm(h, layer["input_norm"]))
            qkv = _linear(x, layer, "qkv").view(num_tokens, -1, c.head_dim)
            q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
            if c.qk_norm:
                q, k = self._norm(q, layer["q_norm"]), self._norm(k, layer["k_norm"])
            q, k, v = cast(_rotate(q, cos, sin)), cast(_rotate(k, cos, sin)), cast(v)
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(c.head_dim) + mask
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            attended = torch.einsum("hqk,khd->hqd", cast(weights), v) / weights.sum(-1, keepdim=True)
            attended = attended.transpose(0, 1).reshape(num_tokens, -1)
            h = h + _linear(inputs(attended), layer, "o")
            x = inputs(self._norm(h, layer["post_norm"]))
            x = torch.nn.functional.silu(_linear(x, layer, "gate")) * _linear(x, layer, "up")
            h = h + _linear(inputs(x), layer, "down")
        last = self._norm(h, self.final_norm)
        return (inputs(last) if c.quantize_lm_head else cast(last)) @ self.lm_head.T

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight


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
