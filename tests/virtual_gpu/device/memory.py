"""Memory of the virtual GPU as torch holds it: freed in the order of the stream that it was allocated on."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Sequence

import torch

from faser_trtllm.errors import FaserError
from tests.virtual_gpu.device.streams import call, current_stream, is_capturing

_waiting: list[_Block] = []  # freed where it was not possible, as while a stream captured


class _Block:
    """Memory at an address; freed when nobody refers to it."""

    def __init__(self, size: int, is_device: bool) -> None:
        _retry()
        self._is_device = is_device
        self._stream = current_stream()
        # A graph's memory is the graph's.
        self._is_owned = not (is_device and is_capturing())
        name, arguments = ("cuMemAllocAsync", (size, self._stream)) if is_device else ("cuMemHostAlloc", (size, 0))
        self.address = int(call(name, *arguments))

    def free(self) -> bool:
        try:
            if not self._is_owned:
                return True
            if self._is_device:
                call("cuMemFreeAsync", self.address, self._stream)
            else:
                call("cuMemFreeHost", self.address)
        except FaserError as error:
            if "INVALID_HANDLE" not in str(error):
                return False
            self._stream = 0  # its stream is gone
            return self.free()
        return True

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if not self.free():
                _waiting.append(self)


def _retry() -> None:
    if _waiting and not is_capturing():
        waiting, _waiting[:] = _waiting[:], []
        _waiting.extend(block for block in waiting if not block.free())


def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *, is_device: bool = True) -> torch.Tensor:
    """A torch tensor over new memory: poisoned if it is the device's, zeroed if it is the host's."""
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if math.prod(size) else 1
    num_bytes = reach * dtype.itemsize
    block = _Block(num_bytes, is_device)
    buffer = (ctypes.c_uint8 * num_bytes).from_address(block.address)
    buffer.block = block
    return torch.frombuffer(buffer, dtype=dtype).as_strided(size, stride)
