"""gpu-marked tests are skipped, with the reason, where no CUDA device can be opened."""

from __future__ import annotations

import functools

import pytest

from faser_trtllm.errors import FaserError
from faser_trtllm.ops.cuda.driver import device_arch


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
