"""Check device tensors and turn them into addresses for launches. Types are named as in the kernels, such as bf16."""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from faser_trtllm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TYPE_NAMES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float64": "fp64",
    "torch.float8_e4m3fn": "e4m3",
    "torch.int32": "int32",
    "torch.int64": "int64",
    "torch.uint8": "uint8",
}
E4M3_MAX = 448.0
# cp.async and vector loads move 16 bytes.
ALIGNMENT = 16


class PagedKv(NamedTuple):
    """A layer's paged KV cache, and the requests of a pass in it."""

    # [num_blocks, num_kv_heads, tokens_per_block, head_dim] of the queries' type, or e4m3 holding K / k_scale and
    # V / v_scale.
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor  # int32 [batch_size, max_blocks_per_seq]
    cu_q_lens: Tensor  # int32 [batch_size + 1]: each request's range of the pass's rows
    kv_lens: Tensor  # int32 [batch_size]: tokens, new rows included


@dataclass(frozen=True, slots=True)
class PagedShape:
    """Sizes of one launch over a paged KV cache, and the names of its types in the kernels."""

    num_rows: int
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    tokens_per_block: int
    max_blocks_per_seq: int
    dtype: str
    kv_dtype: str

    @property
    def types(self) -> str:
        """The types in the names of kernels."""
        return self.dtype if self.kv_dtype == self.dtype else f"{self.dtype}_{self.kv_dtype}"


def check_kv(kv: PagedKv, dtype: str, head_dim: int) -> str:
    """Return the name of the cache's type; raise InvalidArgumentError if the tensors do not fit dtype and head_dim."""
    kv_dtype, batch_size = type_name("k_cache", kv.k_cache, dtype, "e4m3"), kv.kv_lens.shape[0]
    expect("k_cache", kv.k_cache, kv_dtype, (None, None, None, head_dim))
    expect("v_cache", kv.v_cache, kv_dtype, tuple(kv.k_cache.shape))
    expect("kv_lens", kv.kv_lens, "int32", (batch_size,))
    expect("cu_q_lens", kv.cu_q_lens, "int32", (batch_size + 1,))
    expect("block_table", kv.block_table, "int32", (batch_size, None))
    return kv_dtype


class Pointer(ctypes.c_void_p):
    """The address of `tensor` as an argument of a kernel; null without one."""

    tensor: Any = None

    @classmethod
    def to(cls, tensor: Any) -> Pointer:
        made = cls(tensor.data_ptr())
        made.tensor = tensor
        return made


def type_name(name: str, tensor: Tensor, *allowed: str) -> str:
    """Return the name of a tensor's type in the kernels; raise InvalidArgumentError unless it is known and allowed."""
    found = _type_name(tensor.dtype)
    if found not in (allowed or TYPE_NAMES.values()):
        wanted = " or ".join(allowed or TYPE_NAMES.values())
        raise InvalidArgumentError(f"{name} has type {found}; it must be {wanted}")
    return found


@functools.cache
def _type_name(dtype: torch.dtype) -> str:
    return TYPE_NAMES.get(str(dtype), str(dtype))


def expect(name: str, tensor: Tensor, dtype: str, shape: tuple[int | None, ...]) -> None:
    """Raise InvalidArgumentError unless a tensor has this type and shape (None: any size) and is contiguous."""
    if tensor.shape != shape and not _fits(tensor.shape, shape):
        wanted = ["any" if size is None else size for size in shape]
        raise InvalidArgumentError(f"{name} has shape {list(tensor.shape)}; it must be {wanted}")
    type_name(name, tensor, dtype)
    if not tensor.is_contiguous():
        raise InvalidArgumentError(f"{name} is not contiguous (strides {tensor.stride()}); pass a contiguous copy")


def _fits(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(found) == len(shape) and all(want in (None, have) for want, have in zip(shape, found, strict=True))


def pointer(name: str, tensor: Any, dtype: str, shape: tuple[int | None, ...]) -> Pointer:
    """Return the address of a tensor, after expect(); null for None."""
    if tensor is None:
        return Pointer()
    expect(name, tensor, dtype, shape)
    return Pointer.to(tensor)


def pointer_to(tensor: Tensor | None) -> Pointer:
    """Return a tensor's address, null for None; InvalidArgumentError unless it is a multiple of 16 (int32: of 4)."""
    if tensor is None:
        return Pointer()
    found = Pointer.to(tensor)
    address = found.value or 0
    alignment = 4 if _type_name(tensor.dtype) == "int32" else ALIGNMENT
    if address % alignment:
        raise InvalidArgumentError(
            f"a tensor's address {address:#x} is not a multiple of {alignment}; align its offset"
        )
    return found


def bits_of(value: float) -> int:
    """Return the bits of a float32 as an int32; kernels take floats this way."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)
