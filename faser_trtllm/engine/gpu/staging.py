"""Host-to-device staging: fill page-locked memory and send it in one copy, without waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from faser_trtllm.engine.gpu.runtime import Runtime

if TYPE_CHECKING:
    from torch import Tensor

_NUM_HOST_BUFFERS = 2


class Staging:
    """int32 memory at a fixed device address, and two alternating host buffers.

    fill() returns host memory that no copy is reading; send() copies its first numbers to the device.
    """

    def __init__(self, runtime: Runtime, size: int) -> None:
        import torch

        self._runtime = runtime
        self.device: Tensor = torch.zeros(size, dtype=torch.int32, device=runtime.device)
        self._host = [runtime.host_tensor((size,), torch.int32) for _ in range(_NUM_HOST_BUFFERS)]
        self._arrays: list[npt.NDArray[np.int32]] = [tensor.numpy() for tensor in self._host]
        self._copied: list[Callable[[], None] | None] = [None] * _NUM_HOST_BUFFERS
        self._turn = 0

    @property
    def size(self) -> int:
        return len(self._arrays[0])

    def fill(self) -> npt.NDArray[np.int32]:
        """Return host memory [size] int32 to write before send(), with stale contents."""
        self._turn = (self._turn + 1) % _NUM_HOST_BUFFERS
        copied = self._copied[self._turn]
        if copied is not None:
            copied()
        return self._arrays[self._turn]

    def send(self, count: int) -> None:
        """Copy the first `count` numbers of the buffer that fill() returned last, on the current stream."""
        self.device[:count].copy_(self._host[self._turn][:count], non_blocking=True)
        self._copied[self._turn] = self._runtime.mark()
