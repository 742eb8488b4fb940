"""Compute the inverse frequencies of rotary position embedding, scaled, and the factor on cos and sin.

Formulas, order of operations and float32 are those of transformers (modeling_rope_utils.py):
default: RoFormer (arXiv 2104.09864); linear: kaiokendev's position interpolation (arXiv 2306.15595);
llama3: Llama 3.1's reference code (meta-llama/llama-models); yarn: YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rope for all layers; fields that a rope_type does not use keep their defaults."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position_embeddings: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: computed from factor and the mscales
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    freq_factors: tuple[float, ...] = ()  # freq_factors (GGUF): divisors of the head_dim / 2 frequencies


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Float32Array, float]:
    """Return inv_freq fp32 [head_dim / 2] and the factor on cos and sin; ValueError for an unknown rope_type."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = np.power(np.float32(rope.theta), exponents)
    inv_freq = np.float32(1) / wavelengths
    if rope.rope_type == "default":
        return inv_freq, 1.0
    if rope.rope_type == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.rope_type == "freq_factors":
        return inv_freq / np.array(rope.freq_factors, np.float32), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, wavelengths, head_dim), _yarn_attention_factor(rope)
    raise ValueError(f"rope_type {rope.rope_type!r}")


def _llama3(rope: RopeConfig, inv_freq: Float32Array) -> Float32Array:
    old_len = rope.original_max_position_embeddings
    wavelen = np.float32(2 * math.pi) / inv_freq
    scaled = inv_freq / np.float32(rope.factor)
    smooth = (np.float32(old_len) / wavelen - np.float32(rope.low_freq_factor)) / np.float32(
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (np.float32(1) - smooth) * scaled + smooth * inv_freq
    low_frequencies = wavelen > old_len / rope.low_freq_factor
    high_frequencies = wavelen < old_len / rope.high_freq_factor
    scaling: Float32Array = np.where(high_frequencies, inv_freq, np.where(low_frequencies, scaled, blended))
    return scaling


def _yarn(rope: RopeConfig, wavelengths: Float32Array, head_dim: int) -> Float32Array:
    def correction_dim(num_rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    extrapolated: Float32Array = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    interpolation = np.float32(1) / (np.float32(rope.factor) * wavelengths)
    extrapolation = np.float32(1) / wavelengths
    inv_freq: Float32Array = interpolation * (np.float32(1) - extrapolated) + extrapolation * extrapolated
    return inv_freq


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
