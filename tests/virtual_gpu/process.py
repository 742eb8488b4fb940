"""A process of its own with the virtual GPU, since a process cannot be rid of it."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class VirtualGpuProcess:
    """run(): calls a function of a module there, one after the other; its assertions and results come back."""

    def __init__(self, seed: int = 0, memory_mib: int = 1024, major: int = 12) -> None:
        """major: of the compute capability. Every backend runs on 12, mixtures of experts on 9 and 10."""
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, _begin, (seed, memory_mib, major))

    def run(self, function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
        return self._pool.submit(function, *arguments, **options).result()

    def __enter__(self) -> VirtualGpuProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()


def _begin(seed: int, memory_mib: int, major: int) -> None:
    os.environ |= {"VIRTUAL_GPU_SEED": str(seed), "VIRTUAL_GPU_MEMORY_MIB": str(memory_mib)}
    os.environ["LIBCUDA_MAJOR"] = str(major)
    import torch

    from tests.virtual_gpu.device.install import install

    torch.set_num_threads(1)
    install()
    gc.freeze()
    gc.set_threshold(20_000)  # a device's handles are many, and few are garbage
