"""Tensor types of GGUF and how their blocks decode to fp32.

Layouts: ggml's ggml-common.h; ids: enum ggml_type in ggml.h. Products and sums are single fp32 operations in the order
of ggml's reference, so a value is the one that ggml's portable code computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.models.weights import Float32Array, float32_from_bfloat16

ByteArray = npt.NDArray[np.uint8]

UNREAD_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
"""Names of the types that exist and are not read, for errors."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """num_values neighbours of a row take num_bytes; decode: [n, num_bytes] -> fp32 [n, num_values]."""

    name: str
    num_values: int
    num_bytes: int
    decode: Callable[[ByteArray], Float32Array]


def _float16(raw: ByteArray) -> Float32Array:
    """[n, 2 k] bytes -> [n, k] fp32."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: ByteArray) -> ByteArray:
    """[..., k] bytes -> [..., 2 k]: all low halves, then all high halves."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _high_bits(raw: ByteArray) -> ByteArray:
    """[n, 4] bytes, a little-endian uint32 -> its bits [n, 32], shifted to the place above a nibble."""
    found: ByteArray = np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)
    return found


def _f32(raw: ByteArray) -> Float32Array:
    return np.ascontiguousarray(raw).view("<f4")


def _bf16(raw: ByteArray) -> Float32Array:
    return float32_from_bfloat16(np.ascontiguousarray(raw).view("<u2"))


def _q4_0(raw: ByteArray) -> Float32Array:
    return _float16(raw[:, :2]) * (_nibbles(raw[:, 2:]).astype(np.float32) - 8)


def _q4_1(raw: ByteArray) -> Float32Array:
    return _float16(raw[:, :2]) * _nibbles(raw[:, 4:]).astype(np.float32) + _float16(raw[:, 2:4])


def _q5_0(raw: ByteArray) -> Float32Array:
    quants = _nibbles(raw[:, 6:]) | _high_bits(raw[:, 2:6])
    return _float16(raw[:, :2]) * (quants.astype(np.float32) - 16)


def _q5_1(raw: ByteArray) -> Float32Array:
    quants = _nibbles(raw[:, 8:]) | _high_bits(raw[:, 4:8])
    return _float16(raw[:, :2]) * quants.astype(np.float32) + _float16(raw[:, 2:4])


def _q8_0(raw: ByteArray) -> Float32Array:
    return _float16(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


def _k_scales(raw: ByteArray) -> tuple[Float32Array, Float32Array]:
    """The head of a q4_K or q5_K block [n, 16] -> scale and minimum of its 8 groups, [n, 8, 1] each.

    Two fp16 factors, then 12 bytes with eight 6-bit scales and minima: those of groups 0 to 3 in the low six bits of
    bytes 0 to 3 and 4 to 7; of groups 4 to 7 the low nibbles in bytes 8 to 11 and the upper two bits above the others.
    """
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    factors = _float16(raw[:, :4])
    return (factors[:, :1] * scales)[..., None], (factors[:, 1:] * minima)[..., None]


def _q4_k(raw: ByteArray) -> Float32Array:
    scales, minima = _k_scales(raw)
    quants = _nibbles(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (scales * quants - minima).reshape(-1, 256)


def _q5_k(raw: ByteArray) -> Float32Array:
    scales, minima = _k_scales(raw)
    bits = np.unpackbits(raw[:, 16:48, None], axis=2, bitorder="little").swapaxes(1, 2)
    quants = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (bits << np.uint8(4))
    values: Float32Array = (scales * quants - minima).reshape(-1, 256)
    return values


def _q6_k(raw: ByteArray) -> Float32Array:
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    quants = (low | (high << 4)).astype(np.float32) - 32
    scales = _float16(raw[:, 208:]) * raw[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[..., None] * quants.reshape(-1, 16, 16)).reshape(-1, 256)


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _float16),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _bf16),
}
"""The types that are read, by ggml's id."""


def describe_type(kind: int) -> str:
    """A type's name and id, also of one that is not read."""
    block = BLOCK_TYPES.get(kind)
    return f"{block.name if block else UNREAD_TYPES.get(kind, 'unknown')} ({kind})"


def decode(block: BlockType, data: npt.NDArray[Any]) -> Float32Array:
    """Whole blocks as bytes [n * num_bytes] -> fp32 [n * num_values]."""
    with np.errstate(all="ignore"):  # of damaged scales; the caller looks at the values
        return block.decode(data.reshape(-1, block.num_bytes)).reshape(-1)
