"""The GPU's machine over the host's runtime: what is run and timed. Streams and capture are a GPU's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import machine as machines
from benchmarks.gpu.dry_gpu import HostRuntime
from benchmarks.gpu.machine import CALLS_PER_GRAPH, GpuMachine
from faser_trtllm.engine.gpu import runtime
from faser_trtllm.engine.gpu.runtime import Replay
from faser_trtllm.partition.green_context import GpuPartition

WHOLE = GpuPartition("whole", 7, 132)


class Runtime(HostRuntime):
    """Time is the number of calls so far."""

    captures = True
    num_calls = 0

    def now(self) -> int:
        return self.num_calls

    def ms_between(self, begin: Any, end: Any) -> float:
        return float(end - begin)

    def capture(self, work: Callable[[], None]) -> Replay:
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().capture(work)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[GpuMachine, Runtime]:
    host = Runtime()
    monkeypatch.setattr(runtime, "CudaRuntime", lambda: host)
    monkeypatch.setattr(machines, "GpuPartitions", lambda counts: SimpleNamespace(whole=WHOLE))
    monkeypatch.setattr(machines, "num_sms", lambda: 132)
    monkeypatch.setattr(machines, "load_driver", lambda: SimpleNamespace(**{name: Driver() for name in DRIVER}))
    monkeypatch.setattr(machines, "CLOCK_SIZE", 2)
    monkeypatch.setattr(machines, "CLOCK_S", 0.0)
    return GpuMachine(), host


DRIVER = ("CUdevice_attribute", "cuDeviceGetAttribute", "cuDeviceGet")


class Driver:
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38

    def __call__(self, *arguments: int) -> tuple[int, int]:
        return 0, 50 << 20


@pytest.mark.parametrize("captures", [True, False])
def test_every_call_is_timed_on_the_whole_gpu(made: tuple[GpuMachine, Runtime], captures: bool) -> None:
    """The calls run in a CUDA graph or, if capture fails, one by one."""
    machine, host = made
    host.captures = captures
    seen: Counter[tuple[int, int]] = Counter()

    def call(number: int) -> None:
        seen[number, machine.stream()] += 1
        host.num_calls += 1

    assert machine.l2_bytes == 50 << 20
    assert machine.time_ms([lambda: call(0), lambda: call(1)], 3) == 1.0
    assert machine.graph_failures == (not captures)
    each = 1 + 4 * CALLS_PER_GRAPH // 2  # first alone, then in a warm-up and in three repeats
    assert seen == {(0, WHOLE.stream): each, (1, WHOLE.stream): each}
