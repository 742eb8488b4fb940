"""Weight-only quantisation: a matrix as small integers with a scale for each output or each group of inputs.

Symmetric: weight = integer * scale. The plain reference of what the CPU engine's kernels multiply by.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import InvalidArgumentError

GROUP_SIZES = (32, 128)
DEFAULT_GROUP_SIZE = 32
_SPELLING = re.compile(r"(int8|W8A16|int4|W4A16)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Scheme:
    """bits: 4 or 8. group_size: neighbouring inputs that share a scale; 0: all of an output's.

    lm_head: of a model, that its LM head (and the embedding where they are one) is quantised besides its layers.
    """

    bits: int
    group_size: int
    lm_head: bool = False

    @classmethod
    def parse(cls, text: str) -> Scheme | None:
        """int8 (W8A16), int4 (W4A16), int4:128 (W4A16:128); none is None. InvalidArgumentError for others."""
        if text == "none":
            return None
        found = _SPELLING.fullmatch(text)
        if found is not None and found[1] in ("int8", "W8A16") and found[2] is None:
            return cls(8, 0)
        if found is not None and found[1] in ("int4", "W4A16"):
            group_size = int(found[2] or DEFAULT_GROUP_SIZE)
            if group_size in GROUP_SIZES:
                return cls(4, group_size)
        raise InvalidArgumentError(
            f"quantization is {text}, it must be none, int8 (W8A16), int4 (W4A16), or int4 in groups of 32 or 128 "
            "inputs (int4:32, int4:128)"
        )

    def __str__(self) -> str:
        return f"int{self.bits}" + (f":{self.group_size}" if self.group_size else "")


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [out, in]. values: int8 [out, in] for 8 bits; for 4 bits uint8 [out, in / 2], the even input in the low
    half of a byte, each half in two's complement (-8..7). scales: float32 [out, in / group_size]. group_size: `in` for
    one scale per output. ValueError if the shapes do not fit together.
    """

    values: npt.NDArray[Any]
    scales: npt.NDArray[np.float32]
    group_size: int
    bits: int

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
        """(out, in)."""
        return len(self.values), self.values.shape[1] * 8 // self.bits

    def integers(self) -> npt.NDArray[np.int8]:
        """int8 [out, in]."""
        if self.bits == 8:
            integers: npt.NDArray[np.int8] = self.values.astype(np.int8, copy=False)
            return integers
        halves = np.stack([self.values & 15, self.values >> 4], -1).reshape(self.shape)
        signed: npt.NDArray[np.int8] = (halves ^ 8).astype(np.int8) - np.int8(8)
        return signed


def quantize(weight: npt.NDArray[np.float32], scheme: Scheme) -> QuantizedWeight:
    """Quantise float32 [out, in], rounding to nearest.

    8 bits: scale = max |w| / 127. 4 bits: scale = the entry of largest magnitude / -8, so that all 16 values are used
    (as llama.cpp's q4_0). ValueError if `in` is not a multiple of the group, or if a weight is not finite.
    """
    num_out, num_in = weight.shape
    group_size = scheme.group_size or num_in
    if num_in % group_size:
        raise ValueError(f"{num_in} inputs are not a multiple of the group of {group_size}")
    if not np.isfinite(weight).all():
        raise ValueError("a weight is not finite")
    groups = weight.reshape(num_out, -1, group_size)
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
    """Of int8 [out, in], within -8..7 for 4 bits, and scales [out, in / group_size]."""
    if bits == 8:
        return QuantizedWeight(integers, scales, group_size, bits)
    halves = integers.view(np.uint8) & 15
    return QuantizedWeight(halves[:, 0::2] | (halves[:, 1::2] << 4), scales, group_size, bits)


def dequantize(quantized: QuantizedWeight) -> npt.NDArray[np.float32]:
    """float32 [out, in]."""
    num_out, num_in = quantized.shape
    groups = quantized.integers().reshape(num_out, -1, quantized.group_size).astype(np.float32)
    return (groups * quantized.scales[:, :, None]).reshape(num_out, num_in)
