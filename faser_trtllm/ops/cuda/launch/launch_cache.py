"""Launches that are checked and packed once: what layers launch over and over, at the same addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from faser_trtllm.ops.cuda.module import Argument, Dim3, Launcher, PackedArguments

if TYPE_CHECKING:
    from torch import Tensor

MAX_LAUNCHES = 4096
"""Kept at a time: passes without a graph may have any number of rows, each with launches of its own."""


class LaunchCache:
    """launch(): an op's launches, which are made by its own function the first time and repeated from then on."""

    def __init__(self) -> None:
        self._held: dict[Hashable, _Recorder] = {}

    def __len__(self) -> int:
        return len(self._held)

    def launch(self, key: Hashable, launcher: Launcher, stream: int, op: Callable[[Launcher], None]) -> None:
        """op(launcher), or what it launched for this key before; asynchronous on the stream.

        key: whatever op's launches depend on, see key_of(). What op raises is raised, and nothing is kept.
        """
        recorded = self._held.get(key)
        if recorded is None:
            recorded = _Recorder()
            op(recorded)
            if len(self._held) >= MAX_LAUNCHES:
                self._held.clear()
            self._held[key] = recorded
        for kernel, grid, block, arguments in recorded.launches:
            launcher.launch(kernel, grid, block, arguments, stream)


def key_of(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """What a launch depends on: addresses and shapes. Tensors must be contiguous, and one op's always of one dtype at
    one address."""
    return tuple(None if x is None else (x.data_ptr(), x.shape) for x in tensors)


class _Recorder:
    """A launcher that launches nothing."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, Dim3, Dim3, PackedArguments]] = []

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument], stream: int = 0) -> None:
        self.launches.append((kernel, grid, block, PackedArguments(arguments)))
