"""A GPU of torch's fake CUDA tensors, which have shapes, types and a device but no values; and a lint of captures.

The engine runs op by op with torch's own shape functions for CUDA, so `is_cuda` branches are taken, and nothing is
computed. Fake tensors themselves refuse what needs a value, as item() and nonzero() do. Of captures, the lint refuses
copies between host and device as well, and waits. Kernels are launched to nowhere.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.dry_gpu import HostRuntime
from faser_trtllm.engine.gpu.ops import STEMS, Ops
from faser_trtllm.engine.gpu.runtime import Replay
from tests.engine.cuda.host_executor import HostGpu
from tests.ops.cuda.emulation import built, host_compiler


class CaptureLint(TorchDispatchMode):
    """ops: how often each was captured. num_captures: pieces of work that were."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.num_captures = 0
        self._is_capturing = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._is_capturing:
            self.ops[str(func)] += 1
            is_copy = "copy" in func.name()
            tensors = (value for value in tree_leaves((args, kwargs, found)) if isinstance(value, torch.Tensor))
            # Numbers of the host are arguments of a kernel.
            devices = {tensor.device.type for tensor in tensors if tensor.dim() or is_copy}
            assert devices <= {"cuda"}, f"{func} in a capture works on {sorted(devices)}"
        return found

    def capture(self, work: Callable[[], None]) -> None:
        self.refuse("a capture")
        self._is_capturing = True
        try:
            work()
        finally:
            self._is_capturing = False
        self.num_captures += 1

    def refuse(self, what: str) -> None:
        assert not self._is_capturing, f"{what} in a capture"


class _Runtime(HostRuntime):
    """Names for streams, and nothing to wait for. Host memory is real, as code writes numbers to it."""

    def __init__(self, lint: CaptureLint) -> None:
        super().__init__()
        self.device = torch.device("cuda", 0)
        self._lint = lint

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._lint.refuse("page-locked memory")
        with unset_fake_temporarily():
            return torch.zeros(shape, dtype=dtype)

    def wait(self) -> None:
        self._lint.refuse("a wait")

    def capture(self, work: Callable[[], None]) -> Replay:
        self._lint.capture(work)
        return lambda: None

    def capture_loop(self, begin: Callable[[], None], step: Callable[[], None], going: torch.Tensor) -> Replay:
        """Once around; what sets the condition is no op of torch."""

        def run() -> None:
            begin()
            step()

        return self.capture(run)


class _Nowhere:
    def launch(self, *arguments: Any, **options: Any) -> None:
        pass


class FakeCudaGpu(HostGpu):
    weights_dtype = None  # type: ignore[assignment]  # the engine file's

    def __init__(self, lint: CaptureLint) -> None:
        self._lint = lint

    def make_runtime(self) -> _Runtime:
        return _Runtime(self._lint)

    def make_ops(  # type: ignore[override]
        self, runtime: Any, head_dim: int | None, deterministic: bool = False, has_mxfp4: bool = False
    ) -> Ops:
        has_own_groups = deterministic or has_mxfp4  # as on compute capability 9.x
        launchers = {stem: _Nowhere() for stem in STEMS if stem != "grouped_matmul" or has_own_groups}
        return Ops(launchers, runtime.stream, self.whole.num_sms, deterministic)


@contextmanager
def fake_cuda() -> Iterator[CaptureLint]:
    """Tensors are fake within, and their ops linted; a test is skipped where that cannot be."""
    if not torch.backends.cuda.is_built():
        _guard()
    with FakeTensorMode(allow_non_fake_inputs=True), CaptureLint() as lint:
        yield lint


@functools.cache
def _guard() -> ctypes.CDLL:
    """Indexing asks for a guard of the tensor's device."""
    if host_compiler() is None:
        pytest.skip("no host C++ compiler (CXX, c++) to build torch's device guard with")
    torch_dir = Path(torch.__file__).parent
    source = Path(__file__).parent / "device_guard.cpp"
    flags = ["-std=c++17", "-shared", "-fPIC", "-isystem", str(torch_dir / "include")]
    inputs = [str(source), f"-L{torch_dir / 'lib'}", "-lc10"]
    return ctypes.CDLL(str(built(f"device_guard_{torch.__version__}", inputs, flags, [source])))
