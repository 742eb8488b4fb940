"""Quantize matrices symmetrically, with a scale per output or per group of inputs: weight = number * scale.

This is the reference for the CPU engine's kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.mxfp4 import BLOCK_SIZE, e2m1_numbers, mxfp4_blocks

GROUP_SIZES = (32, 128)
DEFAULT_GROUP_SIZE = 32
FP8 = "FP8"
"""TensorRT-LLM's name for layers whose matrices and inputs are in e4m3; no Scheme stands for it."""

_SPELLING = re.compile(r"(int8|W8A16|W8A8|int4|W4A16|W4A8)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to quantize a model.

    bits: 4 or 8, per weight.
    group_size: neighboring inputs that share a scale; 0 for one scale per output.
    lm_head: quantize the LM head, too, and an embedding tied to it.
    activation_bits: 16 (bf16), or 8: inputs are quantized when they are used (lab/reference/quantized_weight.py).
    is_mxfp4: e2m1 numbers with powers of two as scales, for experts only; keeps a checkpoint's MXFP4 unchanged.
    """

    bits: int
    group_size: int
    lm_head: bool = False
    activation_bits: int = 16
    is_mxfp4: bool = False

    @classmethod
    def parse(cls, text: str, field: str = "quantization") -> Scheme | None:
        """Parse int8 (W8A16), int4 (W4A16), W8A8, W4A8, a group size as in int4:128, mxfp4, or none (returns None).

        InvalidArgumentError, which names `field`, for other texts.
        """
        if text == "none":
            return None
        if text == "mxfp4":
            return MXFP4
        found = _SPELLING.fullmatch(text)
        if found is not None:
            activation_bits = 8 if found[1].endswith("A8") else 16
            bits = 8 if found[1] in ("int8", "W8A16", "W8A8") else 4
            if bits == 8 and found[2] is None:
                return cls(8, 0, activation_bits=activation_bits)
            group_size = int(found[2] or DEFAULT_GROUP_SIZE)
            if bits == 4 and group_size in GROUP_SIZES:
                return cls(4, group_size, activation_bits=activation_bits)
        raise InvalidArgumentError(
            f"{field} is {text}; it must be none, int8 (W8A16), int4 (W4A16), W8A8 or W4A8, those of 4 bits in "
            "groups of 32 or 128 inputs (int4:128, W4A8:128), mxfp4 (experts only), or FP8 on the TensorRT backends"
        )

    @property
    def algorithm(self) -> str:
        """A quant_algo, such as W8A16; TensorRT-LLM knows only those with 16-bit activations."""
        return f"W{self.bits}A{self.activation_bits}{'_MXFP4' if self.is_mxfp4 else ''}"

    def __str__(self) -> str:
        if self.is_mxfp4:
            return "mxfp4"
        name = f"int{self.bits}" if self.activation_bits == 16 else self.algorithm
        return name + (f":{self.group_size}" if self.group_size else "")


MXFP4 = Scheme(4, BLOCK_SIZE, is_mxfp4=True)


def scheme_of(model: dict[str, Any]) -> Scheme | None:
    """Return the scheme in the object `model` of an engine file's header, None for bf16; ValueError if unknown."""
    found = model.get("quantization")
    if found is None:
        return None
    scheme = Scheme(**found)
    if scheme.is_mxfp4 and scheme == MXFP4 and "experts" in model:
        return scheme
    if (
        scheme.is_mxfp4
        or scheme.bits not in (4, 8)
        or scheme.group_size not in (0, 32, 128)
        or scheme.activation_bits not in (8, 16)
    ):
        raise ValueError(f"model.quantization is {found!r}")
    return scheme


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized matrix [out, in]. ValueError if the shapes do not fit together.

    values: int8 [out, in] for 8 bits; for 4 bits uint8 [out, in / 2], the even input in the low half of a byte, each
        half in two's complement (-8..7), or e2m1 if is_mxfp4.
    scales: float32 [out, in / group_size]. group_size: `in` for one scale per output.
    """

    values: npt.NDArray[Any]
    scales: npt.NDArray[np.float32]
    group_size: int
    bits: int
    is_mxfp4: bool = False

    def __post_init__(self) -> None:
        dtype = {8: np.int8, 4: np.uint8}.get(self.bits)
        num_in = self.values.shape[1] * 8 // self.bits
        if (
            self.values.dtype != dtype
            or self.scales.dtype != np.float32
            or self.scales.shape != (len(self.values), num_in // self.group_size)
            or num_in % self.group_size
        ):
            raise ValueError(
                f"{self.bits} bits in {self.values.dtype} {self.values.shape} with scales {self.scales.dtype} "
                f"{self.scales.shape} are no matrix in groups of {self.group_size}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), self.values.shape[1] * 8 // self.bits

    def numbers(self) -> npt.NDArray[Any]:
        """Return the unscaled numbers [out, in]: int8, or fp32 if is_mxfp4."""
        if self.is_mxfp4:
            return e2m1_numbers(self.values)
        if self.bits == 8:
            integers: npt.NDArray[np.int8] = self.values.astype(np.int8, copy=False)
            return integers
        halves = np.stack([self.values & 15, self.values >> 4], -1).reshape(self.shape)
        signed: npt.NDArray[np.int8] = (halves ^ 8).astype(np.int8) - np.int8(8)
        return signed


def quantize(weight: npt.NDArray[np.float32], scheme: Scheme) -> QuantizedWeight:
    """Quantize float32 [out, in], rounding to nearest.

    8 bits: scale = max |w| / 127. 4 bits: scale = the entry of largest magnitude / -8, so that all 16 values are used
    (as in llama.cpp's q4_0). MXFP4: mxfp4_blocks. ValueError if `in` is not a multiple of the group, or if a weight is
    not finite.
    """
    num_out, num_in = weight.shape
    group_size = scheme.group_size or num_in
    if num_in % group_size:
        raise ValueError(f"{num_in} inputs are not a multiple of the group of {group_size}")
    if not np.isfinite(weight).all():
        raise ValueError("a weight is not finite")
    groups = weight.reshape(num_out, -1, group_size)
    if scheme.is_mxfp4:
        return QuantizedWeight(*mxfp4_blocks(groups), group_size, scheme.bits, is_mxfp4=True)
    if scheme.bits == 8:
        scales = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    else:
        largest = np.abs(groups).argmax(-1, keepdims=True)
        scales = np.take_along_axis(groups, largest, -1) / np.float32(-8)
    scales = scales.astype(np.float32)
    lowest, highest = (-127, 127) if scheme.bits == 8 else (-8, 7)
    ratio = np.divide(groups, scales, out=np.zeros_like(groups), where=scales != 0)
    integers = np.clip(np.rint(ratio), lowest, highest).astype(np.int8).reshape(num_out, num_in)
    return from_integers(integers, scales[:, :, 0], group_size, scheme.bits)


def from_integers(
    integers: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], group_size: int, bits: int
) -> QuantizedWeight:
    """Pack int8 [out, in], within -8..7 for 4 bits, and scales float32 [out, in / group_size] into a matrix."""
    if bits == 8:
        return QuantizedWeight(integers, scales, group_size, bits)
    halves = integers.view(np.uint8) & 15
    return QuantizedWeight(halves[:, 0::2] | (halves[:, 1::2] << 4), scales, group_size, bits)


def dequantize(quantized: QuantizedWeight) -> npt.NDArray[np.float32]:
    num_out, num_in = quantized.shape
    groups = quantized.numbers().reshape(num_out, -1, quantized.group_size).astype(np.float32)
    return (groups * quantized.scales[:, :, None]).reshape(num_out, num_in)
