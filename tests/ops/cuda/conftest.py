"""gpu-marked tests are skipped, with the reason, where no CUDA device can be opened."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from faser_trtllm.errors import FaserError
from faser_trtllm.ops.cuda.compiler import compile_stem
from faser_trtllm.ops.cuda.driver import Launcher, Module, OnStream, device_arch


@functools.cache
def _why_no_gpu() -> str:
    try:
        device_arch()
        import torch
    except (FaserError, ImportError) as error:
        return str(error)
    return "" if torch.cuda.is_available() else "torch has no CUDA here; install a CUDA build of torch"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.skip(f"needs a GPU: {reason}")


@pytest.fixture
def on_gpu() -> Iterator[Callable[[str], Launcher]]:
    """Return a function that loads a stem's kernels on the first GPU, launched on torch's current stream."""
    import torch

    with ExitStack() as stack:

        def launcher(stem: str) -> Launcher:
            module = stack.enter_context(Module(compile_stem(stem, device_arch()).path))
            return OnStream(module, lambda: torch.cuda.current_stream().cuda_stream)

        yield launcher
