"""The machine of sections: a GPU timed by events around captured graphs, or the CPU for a dry run. Needs torch."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.gpu.dry_gpu import DryGpu
from benchmarks.gpu.skipped import Skipped
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.cost_table import Fingerprint
from faser_trtllm.engine.gpu import runtime
from faser_trtllm.engine.gpu.device import Gpu
from faser_trtllm.engine.gpu.runtime import Runtime
from faser_trtllm.engine.opening import OpenedEngines, OpenRequest, open_engines
from faser_trtllm.errors import ConfigError, FaserError
from faser_trtllm.fingerprint import gpu_fingerprint
from faser_trtllm.ops.cuda.driver import OnStream, StreamLauncher, call_driver, load_driver, num_sms
from faser_trtllm.partition.green_context import GpuPartitions

if TYPE_CHECKING:
    import torch

CALLS_PER_GRAPH = 24
CLOCK_SIZE, CLOCK_S = 4096, 0.5  # size and duration of the products that raise the clocks
DEFAULT_L2_BYTES = 64 << 20  # if the driver does not report it
Call = Callable[[], object]


class Machine(Protocol):
    """A machine. device: torch's name. l2_bytes: size of the L2 cache, which timed inputs must exceed."""

    device: str
    is_gpu: bool
    num_sms: int
    l2_bytes: int

    def generator(self, seed: int) -> torch.Generator: ...

    def launcher(self, stem: str, defines: Mapping[str, int] | None = None) -> OnStream | None:
        """Return the compiled kernels of a stem; None in a dry run, which has only the references."""

    def compile(self, wanted: Sequence[tuple[str, Mapping[str, int] | None]]) -> None:
        """Compile (stem, defines) in parallel for launcher(). Failures are raised by launcher()."""

    def stream(self) -> int:
        """Return the current stream, for launches."""

    def synchronize(self) -> None: ...

    def fingerprint(self, made_of: bytes) -> Fingerprint:
        """Return the fingerprint of cost tables that `faser profile` writes here."""

    def open_engines(self, request: OpenRequest, stack: ExitStack) -> OpenedEngines:
        """Call faser_trtllm.engine.opening.open_engines; Skipped for a backend that this machine cannot run."""

    def time_ms(self, calls: Sequence[Call], num_repeats: int = 7) -> float:
        """Return the median ms per call over repeats of all calls in sequence, after a warm-up.

        Pass enough calls on different inputs to exceed the L2 cache.
        """


class GpuMachine:
    """Device 0 with the engines' runtime. Kernels are compiled for it, into the compiler's cache."""

    is_gpu = True

    def __init__(self) -> None:
        try:
            self._runtime: Runtime = runtime.CudaRuntime()
        except ConfigError as error:
            raise ConfigError(f"{error}; --dry_run shows without a GPU that the suite runs") from error
        import torch

        self._torch = torch
        self.device = str(self._runtime.device)
        self.num_sms, self.l2_bytes = num_sms(), _l2_bytes()
        self._whole = GpuPartitions(()).whole  # its stream lives as long as the process
        self._modules: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}
        self.graph_failures = 0
        self._raise_clocks()

    def _raise_clocks(self) -> None:
        """Run a little work, since an idle GPU starts slowly."""
        x = self._torch.randn(CLOCK_SIZE, CLOCK_SIZE, device=self.device).bfloat16()
        end_s = time.monotonic() + CLOCK_S
        while time.monotonic() < end_s:
            for _ in range(20):
                x @ x
            self.synchronize()

    def generator(self, seed: int) -> torch.Generator:
        return self._torch.Generator(self.device).manual_seed(seed)

    def launcher(self, stem: str, defines: Mapping[str, int] | None = None) -> OnStream | None:
        from faser_trtllm.ops.cuda.compiler import compile_stem
        from faser_trtllm.ops.cuda.driver import Module, device_arch

        key = (stem, tuple(sorted((defines or {}).items())))
        if key not in self._modules:
            self._modules[key] = Module(compile_stem(stem, device_arch(), defines=defines).path)
        return OnStream(self._modules[key], self.stream)

    def compile(self, wanted: Sequence[tuple[str, Mapping[str, int] | None]]) -> None:
        from faser_trtllm.ops.cuda.compiler import compile_stem
        from faser_trtllm.ops.cuda.driver import device_arch

        arch = device_arch()
        with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for stem, defines in wanted:
                pool.submit(compile_stem, stem, arch, defines=defines)

    def stream(self) -> int:
        return self._runtime.stream()

    def synchronize(self) -> None:
        self._runtime.wait()

    def fingerprint(self, made_of: bytes) -> Fingerprint:
        return gpu_fingerprint(made_of)

    def open_engines(self, request: OpenRequest, stack: ExitStack) -> OpenedEngines:
        return open_engines(request, stack)

    def time_ms(self, calls: Sequence[Call], num_repeats: int = 7) -> float:
        many = [calls[i % len(calls)] for i in range(max(len(calls), CALLS_PER_GRAPH))]

        def run_all() -> None:
            for call in many:
                call()

        self._runtime.wait()  # inputs come from the default stream, which others do not wait for
        with self._runtime.on(self._whole):
            for call in calls:
                call()
            self._runtime.wait()
            try:
                run = self._runtime.capture(run_all)
            except RuntimeError:  # some library calls cannot be captured; then gaps between launches are included
                self.graph_failures += 1
                self._runtime.wait()
                run = run_all
            run()
            times = []
            for _ in range(num_repeats):
                begin = self._runtime.now()
                run()
                end = self._runtime.now()
                self._runtime.wait()
                times.append(self._runtime.ms_between(begin, end) / len(many))
        return float(statistics.median(times))


def _l2_bytes() -> int:
    driver = load_driver()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
    try:
        return int(
            call_driver(driver, driver.cuDeviceGetAttribute, attribute, call_driver(driver, driver.cuDeviceGet, 0))
        )
    except FaserError:
        return DEFAULT_L2_BYTES


class DryMachine:
    """The CPU for dry runs: a call runs once, and its time is meaningless."""

    device = "cpu"
    is_gpu = False
    num_sms = 4
    l2_bytes = 1 << 10

    def __init__(
        self,
        launchers: Callable[[str, Mapping[str, int] | None], StreamLauncher | None] | None = None,
        gpu: Gpu | None = None,
        tensorrt: Callable[[EngineDir], Any] | None = None,
    ) -> None:
        """Create the machine, in tests with emulated kernels (launchers), a GPU and a stand-in for TensorRT."""
        import torch

        torch.set_num_threads(1)  # more would only add overhead for tiny shapes
        self._launchers, self._gpu, self._tensorrt = launchers, gpu or DryGpu(), tensorrt

    def generator(self, seed: int) -> torch.Generator:
        import torch

        return torch.Generator().manual_seed(seed)

    def launcher(self, stem: str, defines: Mapping[str, int] | None = None) -> OnStream | None:
        launcher = self._launchers(stem, defines) if self._launchers is not None else None
        return None if launcher is None else OnStream(launcher, self.stream)

    def compile(self, wanted: Sequence[tuple[str, Mapping[str, int] | None]]) -> None:
        """Do nothing."""

    def stream(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def fingerprint(self, made_of: bytes) -> Fingerprint:
        return Fingerprint("no GPU (dry run)", "dry run", self.num_sms, hashlib.sha256(made_of).hexdigest())

    def open_engines(self, request: OpenRequest, stack: ExitStack) -> OpenedEngines:
        from faser_trtllm.engine.cuda.open import open_cuda_engines
        from faser_trtllm.engine.tensorrt.open import open_plans

        if request.engines.backend == "cuda":
            return open_cuda_engines(request, self._gpu, stack)
        if self._tensorrt is None:
            raise Skipped("TensorRT's plans run on a GPU only")
        return open_plans(request, self._tensorrt(request.engines), self._gpu, stack)

    def time_ms(self, calls: Sequence[Call], num_repeats: int = 1) -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return max(1e3 * (time.perf_counter() - start) / len(calls), 1e-6)


def open_machine(dry_run: bool) -> Machine:
    """Return the machine; ConfigError if a GPU or torch is missing."""
    return DryMachine() if dry_run else GpuMachine()


def num_copies(num_bytes: float, l2_bytes: int) -> int:
    """Return the number of input sets of this size to rotate, so that none stays in the L2 cache."""
    return max(1, min(64, -(-4 * l2_bytes // max(1, int(num_bytes)))))
