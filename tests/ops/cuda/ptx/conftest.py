"""Memory of the interpreted kernels."""

import pytest

from tests.ops.cuda.ptx.interpretation import HostMemory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    """Whatever tensors a test's launches take the addresses of."""
    return HostMemory(monkeypatch)
