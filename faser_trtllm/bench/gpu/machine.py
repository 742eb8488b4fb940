"""What sections run on: a GPU timed by events over captured graphs, or the CPU for a dry run. Needs torch."""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from faser_trtllm.errors import ConfigError
from faser_trtllm.ops.cuda.module import Launcher

if TYPE_CHECKING:
    import torch

CALLS_PER_GRAPH = 24
Call = Callable[[], object]


class Machine(Protocol):
    """device: torch's name. l2_bytes: of the cache that timed inputs must not fit into."""

    device: str
    is_gpu: bool
    num_sms: int
    l2_bytes: int

    def generator(self, seed: int) -> torch.Generator: ...

    def launcher(self, stem: str, defines: Mapping[str, int] | None = None) -> Launcher | None:
        """The compiled kernels of a stem; None in a dry run, which has the references only."""

    def compile(self, wanted: Sequence[tuple[str, Mapping[str, int] | None]]) -> None:
        """Compile (stem, defines) side by side; launcher() then finds them. What fails, fails again in launcher()."""

    def stream(self) -> int:
        """The current stream, for launches."""

    def synchronize(self) -> None: ...

    def time_ms(self, calls: Sequence[Call], num_repeats: int = 7) -> float:
        """Milliseconds per call: the calls one after the other, the median over repeats, warmed up.

        Give as many calls on different inputs as it takes to outgrow the L2 cache.
        """


class GpuMachine:
    """Device 0. Kernels are compiled for it, into the compiler's cache."""

    device = "cuda"
    is_gpu = True

    def __init__(self) -> None:
        try:
            import torch
        except ImportError as error:
            raise ConfigError("torch is not installed; pip install 'faser-trtllm[bench]'") from error
        if not torch.cuda.is_available():
            raise ConfigError(
                "torch sees no CUDA device; run on a machine with an NVIDIA GPU and a CUDA build of torch, or use "
                "--dry_run"
            )
        self._torch = torch
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")  # the primary context, before anything of the driver's
        properties = torch.cuda.get_device_properties(0)
        self.num_sms = properties.multi_processor_count
        self.l2_bytes = int(getattr(properties, "L2_cache_size", 0)) or 64 << 20
        self._modules: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}
        self.graph_failures = 0
        self._raise_clocks()

    def _raise_clocks(self) -> None:
        """An idle card is slow at first; half a second of work makes the first measurement like the others."""
        x = self._torch.randn(4096, 4096, device="cuda").bfloat16()
        end_s = time.monotonic() + 0.5
        while time.monotonic() < end_s:
            for _ in range(20):
                x @ x
            self.synchronize()

    def generator(self, seed: int) -> torch.Generator:
        return self._torch.Generator("cuda").manual_seed(seed)

    def launcher(self, stem: str, defines: Mapping[str, int] | None = None) -> Launcher | None:
        from faser_trtllm.ops.cuda.compiler import compile_stem
        from faser_trtllm.ops.cuda.module import Module, device_arch

        key = (stem, tuple(sorted((defines or {}).items())))
        if key not in self._modules:
            self._modules[key] = Module(compile_stem(stem, device_arch(), defines=defines).path)
        launcher: Launcher = self._modules[key]
        return launcher

    def compile(self, wanted: Sequence[tuple[str, Mapping[str, int] | None]]) -> None:
        from faser_trtllm.ops.cuda.compiler import compile_stem
        from faser_trtllm.ops.cuda.module import device_arch

        arch = device_arch()
        with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for stem, defines in wanted:
                pool.submit(compile_stem, stem, arch, defines=defines)

    def stream(self) -> int:
        return int(self._torch.cuda.current_stream().cuda_stream)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize()

    def time_ms(self, calls: Sequence[Call], num_repeats: int = 7) -> float:
        torch = self._torch
        many = [calls[i % len(calls)] for i in range(max(len(calls), CALLS_PER_GRAPH))]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            stream.synchronize()
            run: Call
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    for call in many:
                        call()
                run = graph.replay
            except RuntimeError:  # not every library call can be captured; gaps between launches are timed then
                self.graph_failures += 1
                torch.cuda.synchronize()

                def run() -> None:
                    for call in many:
                        call()

            run()
            times = []
            for _ in range(num_repeats):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(stream)
                run()
                end.record(stream)
                end.synchronize()
                times.append(begin.elapsed_time(end) / len(many))
        return float(statistics.median(times))


class DryMachine:
    """The CPU, to walk through a plan: a call is run once, its time means nothing."""

    device = "cpu"
    is_gpu = False
    num_sms = 4
    l2_bytes = 1 << 10

    def __init__(self, launchers: Callable[[str, Mapping[str, int] | None], Launcher | None] | None = None) -> None:
        """launchers: kernels that run on the CPU all the same, as tests have them."""
        import torch

        torch.set_num_threads(1)  # tiny shapes: threads would only wait for each other
        self._launchers = launchers

    def generator(self, seed: int) -> torch.Generator:
        import torch

        return torch.Generator().manual_seed(seed)

    def launcher(self, stem: str, defines: Mapping[str, int] | None = None) -> Launcher | None:
        return self._launchers(stem, defines) if self._launchers is not None else None

    def compile(self, wanted: Sequence[tuple[str, Mapping[str, int] | None]]) -> None:
        """Nothing to compile."""

    def stream(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def time_ms(self, calls: Sequence[Call], num_repeats: int = 1) -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return max(1e3 * (time.perf_counter() - start) / len(calls), 1e-6)


def open_machine(dry_run: bool) -> Machine:
    """ConfigError where a GPU or torch is missing."""
    return DryMachine() if dry_run else GpuMachine()


def num_copies(num_bytes: float, l2_bytes: int) -> int:
    """How many sets of inputs of this size rotate so that none of them is found in the L2 cache."""
    return max(1, min(64, -(-4 * l2_bytes // max(1, int(num_bytes)))))
