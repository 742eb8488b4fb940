"""A cache of launches: they are checked and packed once per shape of tensors, and then repeated in every layer."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from faser_trtllm.ops.cuda.driver import Argument, Dim3, Launcher, OnStream, PackedArguments
from faser_trtllm.ops.cuda.tensors import Pointer

if TYPE_CHECKING:
    from torch import Tensor

_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)


class LaunchCache:
    """Records the launches of an op once per key, and then repeats them with new addresses. Keeps all recordings,
    since passes have few shapes. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[Hashable, _Recorder] = {}

    def __len__(self) -> int:
        return len(self._held)

    def launch(
        self,
        key: Hashable,
        tensors: Sequence[Tensor | None],
        launcher: OnStream,
        op: Callable[[Launcher], None],
    ) -> None:
        """Run op(launcher), or repeat its launches for this key with the addresses of these tensors.

        key: everything that op's launches depend on except addresses: shapes, types, which tensors are None. tensors:
        all that op passes to kernels, equally contiguous and aligned for equal keys. If op raises, nothing is kept.
        """
        recorded = self._held.get(key)
        if recorded is None:
            recorded = _Recorder(tensors)
            op(recorded)
            self._held[key] = recorded
        recorded.pack(recorded.addresses, 0, *[0 if each is None else each.data_ptr() for each in tensors])
        module, stream = launcher.launcher, launcher.stream()
        for kernel, grid, block, arguments in recorded.launches:
            module.launch(kernel, grid, block, arguments, stream)


class _Recorder:
    """A launcher that records launches. Their pointers are in `addresses`, in the order of the tensors."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self.launches: list[tuple[str, Dim3, Dim3, PackedArguments]] = []
        self.addresses = (ctypes.c_void_p * len(tensors))()
        self.pack = struct.Struct(f"{len(tensors)}P").pack_into
        self._arguments = {
            id(tensor): ctypes.c_void_p.from_buffer(self.addresses, _POINTER_BYTES * place)
            for place, tensor in enumerate(tensors)
        }
        self._arguments[id(None)] = ctypes.c_void_p(None)

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument]) -> None:
        held = [self._arguments[id(each.tensor)] if isinstance(each, Pointer) else each for each in arguments]
        self.launches.append((kernel, grid, block, PackedArguments(held)))
