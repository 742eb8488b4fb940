"""Tensors over memory of the virtual GPU, as torch has them.

Of the device: freed in the order of the stream that it was allocated on, or of the pool of the graph that is captured.
Page-locked (pin_memory=True): torch's own allocator's (driver/host_allocator.cpp).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.virtual_gpu.device import frees
from tests.virtual_gpu.device.library import driver
from tests.virtual_gpu.device.streams import call, current_pool, current_stream


class _Block:
    """Memory at an address; freed when nobody refers to it."""

    def __init__(self, size: int) -> None:
        frees.retry()
        self._stream = current_stream()
        self.address = int(call("cuMemAllocAsync", size, self._stream))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            frees.free_or_wait("cuMemFreeAsync", self.address, self._stream)


class _PageLockedBlock:
    """Memory of torch's allocator, whose function is kept, since modules may be gone when an interpreter ends."""

    def __init__(self, size: int) -> None:
        self.address = driver().torch_host_alloc(size)
        self._free = driver().torch_host_free

    def __del__(self) -> None:
        self._free(self.address)


def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A torch tensor over new memory of the device, which is poisoned."""
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if math.prod(size) else 1
    num_bytes, pool = reach * dtype.itemsize, current_pool()
    return _tensor(_Block(num_bytes) if pool is None else pool.take(num_bytes), num_bytes, dtype).as_strided(
        size, stride
    )


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as the graph that is captured knows it: by an address, which keeps nothing of the pool from reuse."""
    pool, storage = current_pool(), tensor.untyped_storage()
    if pool is None or storage.data_ptr() not in pool:
        return tensor
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@functools.cache
def install_page_locked() -> None:
    """torch.zeros takes pin_memory=True, which its CPU build refuses."""
    zeros: Any = torch.zeros

    def with_page_locked(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        like: torch.Tensor = zeros(*size, **options)
        if not pin_memory:
            return like
        num_bytes = max(1, like.numel()) * like.element_size()
        return _tensor(_PageLockedBlock(num_bytes), num_bytes, like.dtype)[: like.numel()].view(like.shape)

    torch.zeros = with_page_locked


def _tensor(block: Any, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    buffer = (ctypes.c_uint8 * num_bytes).from_address(block.address)
    buffer.block = block  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=dtype)
