"""Launch arguments from device tensors: checked, then reduced to addresses."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from faser_trtllm.errors import InvalidArgumentError


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
