"""Kernels by name, from torch's profiler: CUPTI on a GPU, torch's operators in a dry run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu.machine import Machine

NAME_CHARS = 90


@dataclass(frozen=True)
class KernelTime:
    """A kernel's part of one run. us: sum over its launches."""

    name: str
    launches: float
    us: float

    @property
    def us_each(self) -> float:
        return self.us / self.launches


def kernel_times(machine: Machine, work: Callable[[], object], num_runs: int) -> tuple[list[KernelTime], float]:
    """Return the kernels of num_runs runs, slowest first, and ms of a run under the profiler. Warm up first."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    on_device = ProfilerActivity.CUDA in supported_activities()  # type: ignore[no-untyped-call]
    machine.synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]) as found:
        start = time.perf_counter()
        for _ in range(num_runs):
            work()
        machine.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - start) / num_runs
    field = "self_device_time_total" if on_device else "self_cpu_time_total"
    kernels = [
        KernelTime(event.key[:NAME_CHARS], event.count / num_runs, us / num_runs)
        for event in found.key_averages()
        if (us := getattr(event, field)) > 0
    ]
    return sorted(kernels, key=lambda kernel: -kernel.us), wall_ms
