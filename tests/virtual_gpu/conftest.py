"""The virtual GPU as a fixture; skipped, with the reason, where it cannot be built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.virtual_gpu.device.library import why_not
from tests.virtual_gpu.process import VirtualGpuProcess


@pytest.fixture(scope="session")
def gpu() -> Iterator[VirtualGpuProcess]:
    if reason := why_not():
        pytest.skip(reason)
    with VirtualGpuProcess() as process:
        yield process


@pytest.fixture(scope="session")
def hopper() -> Iterator[VirtualGpuProcess]:
    """A virtual GPU of compute capability 9.0, which mixtures of experts run on."""
    if reason := why_not():
        pytest.skip(reason)
    with VirtualGpuProcess(major=9) as process:
        yield process
