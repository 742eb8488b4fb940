"""Launch arguments from device tensors: checked, then reduced to addresses."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import TYPE_CHECKING, Any

from faser_trtllm.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Pointer(ctypes.c_void_p):
    """The address of `tensor` as an argument of a kernel; null without one."""

    tensor: Any = None

    @classmethod
    def to(cls, tensor: Any) -> Pointer:
        made = cls(tensor.data_ptr())
        made.tensor = tensor
        return made


_SUFFIXES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


def dtype_suffix(name: str, tensor: Any, allowed: tuple[str, ...]) -> str:
    """The kernels' name for a tensor's dtype: bf16, fp16 or fp32; InvalidArgumentError unless it is among `allowed`."""
    suffix = _SUFFIXES.get(str(tensor.dtype), "")
    if suffix not in allowed:
        wanted = " or ".join(dtype for dtype, known in _SUFFIXES.items() if known in allowed)
        raise InvalidArgumentError(f"{name} has dtype {tensor.dtype}, it must be {wanted}")
    return suffix


def pointer(name: str, tensor: Any, dtype: str, shape: tuple[int | None, ...]) -> Pointer:
    """The address of a contiguous tensor of a torch dtype and shape (None: any size); else InvalidArgumentError."""
    found = tuple(tensor.shape)
    fits = len(found) == len(shape) and all(want in (None, have) for want, have in zip(shape, found, strict=True))
    if not fits:
        wanted = tuple("any" if size is None else size for size in shape)
        raise InvalidArgumentError(f"{name} has shape {found}, it must be {wanted}")
    if str(tensor.dtype) != f"torch.{dtype}":
        raise InvalidArgumentError(f"{name} has dtype {tensor.dtype}, it must be torch.{dtype}")
    if not tensor.is_contiguous():
        raise InvalidArgumentError(f"{name} has strides {tuple(tensor.stride())}, it must be contiguous")
    return Pointer.to(tensor)


def bits_of(value: float) -> int:
    """The bits of a float32 as an int32, which is how kernels take floats."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


# The kernels' names for torch dtypes.
TYPE_NAMES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "e4m3",
    "torch.int32": "int32",
    "torch.int64": "int64",
}
E4M3_MAX = 448.0
# cp.async and vector loads move 16 bytes.
ALIGNMENT = 16


def type_name(name: str, tensor: Tensor) -> str:
    """bf16, fp16, fp32, e4m3, int32 or int64; InvalidArgumentError for others."""
    known = _type_name(tensor.dtype)
    if known is None:
        raise InvalidArgumentError(f"{name} has type {tensor.dtype}; it must be one of {', '.join(TYPE_NAMES)}")
    return known


@functools.cache
def _type_name(dtype: torch.dtype) -> str | None:
    return TYPE_NAMES.get(str(dtype))


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: str) -> None:
    """InvalidArgumentError unless a tensor has this shape and type and is contiguous."""
    if tensor.shape != shape:
        raise InvalidArgumentError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
    if (found := type_name(name, tensor)) != dtype:
        raise InvalidArgumentError(f"{name} has type {found}; it must be {dtype}")
    if not tensor.is_contiguous():
        raise InvalidArgumentError(f"{name} is not contiguous (strides {tensor.stride()}); pass a contiguous copy")


def same_type(name: str, tensor: Tensor, other: Tensor) -> None:
    """InvalidArgumentError unless two tensors agree in shape, type and layout."""
    expect(name, tensor, tuple(other.shape), type_name(name, other))


def pointer_to(tensor: Tensor | None) -> Pointer:
    """Null for None; InvalidArgumentError unless the address is a multiple of 16 (int32: of 4)."""
    if tensor is None:
        return Pointer()
    found = Pointer.to(tensor)
    address = found.value or 0
    alignment = 4 if type_name("a tensor", tensor) == "int32" else ALIGNMENT
    if address % alignment:
        raise InvalidArgumentError(
            f"a tensor's address {address:#x} is not a multiple of {alignment}; align its offset"
        )
    return found


def kv_values(cache: Tensor, blocks: Tensor, num_tokens: int, scale: float) -> Tensor:
    """The first positions of one request, [num_tokens, num_kv_heads, head_dim] fp32; zeros where there is no block.

    cache [num_blocks, num_kv_heads, tokens_per_block, head_dim]; blocks: the request's row of the block table.
    """
    import torch

    num_blocks, _, tokens_per_block, _ = cache.shape
    places = torch.arange(num_tokens, device=cache.device)
    ids = blocks.to(torch.int64)[places // tokens_per_block]
    exists = (ids >= 0) & (ids < num_blocks)
    if num_blocks == 0:
        return torch.zeros((num_tokens, cache.shape[1], cache.shape[3]), device=cache.device)
    values = cache[ids.clamp(0, num_blocks - 1), :, places % tokens_per_block].float() * scale
    return torch.where(exists[:, None, None], values, torch.zeros_like(values))
