"""No memory grows while requests of random shapes come and go, and none is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faser_trtllm.executor.executor import Executor
from tests.support.checkpoints import make_pair
from tests.support.effort import ONLY_ALL, pick
from tests.virtual_gpu.plan_engines import build_engine_dir
from tests.virtual_gpu.process import VirtualGpuProcess
from tests.virtual_gpu.soak import soak

pytestmark = pytest.mark.slow
NUM_ROUNDS = pick(6, 60)


def _keep_memory(executor: Executor) -> Any:
    from tests.virtual_gpu.device.runtime import VirtualRuntime

    runtime = VirtualRuntime()
    return runtime.host_tensor((100,), _torch().float32), _torch().zeros(100, device=runtime.device)


def _torch() -> Any:
    import torch

    return torch


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    return make_pair(directory, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64)


@ONLY_ALL
@pytest.mark.parametrize("backend", ["cuda", "tensorrt"])
def test_memory_stays_what_it_was(gpu: VirtualGpuProcess, pair: Any, tmp_path: Path, backend: str) -> None:
    path = gpu.run(build_engine_dir, *pair, tmp_path / "engines", backend, "bfloat16")
    begun, largest, *rounds, ended = gpu.run(soak, path, NUM_ROUNDS, seed=5)
    assert begun[0] < largest[0]
    assert begun[1] < largest[1]
    assert all(device <= largest[0] and host <= largest[1] for device, host in rounds), (largest, rounds)
    assert ended == begun


@ONLY_ALL
def test_a_leak_is_seen(gpu: VirtualGpuProcess, pair: Any, tmp_path: Path) -> None:
    path = gpu.run(build_engine_dir, *pair, tmp_path / "engines", "tensorrt", "bfloat16")
    _, largest, *rounds, _ = gpu.run(soak, path, 2, seed=5, leak=_keep_memory)
    assert rounds[-1][0] > largest[0]
    assert rounds[-1][1] > largest[1]
