"""Whole generations in a process with the virtual GPU: tokens, the executor's statistics and the device's counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.engine.gpu.device import CudaGpu
from tests.engine.cuda.host_executor import generate
from tests.virtual_gpu.device.counters import Counters
from tests.virtual_gpu.device.library import driver


@dataclass(frozen=True)
class Generated:
    tokens: list[list[int]]
    stats: dict[str, float]
    counters: Counters


def generate_cuda(engines: EngineDir, policy: str, requests: Any, seed: int = 0, **options: Any) -> Generated:
    """Generate with the cuda backend. seed: the seed of the order of work. Counting starts at the first request."""
    driver().seed(seed)
    torch.manual_seed(0)
    before: list[Counters] = []
    with CudaGpu() as gpu:
        opened = lambda: before.append(Counters.now())  # noqa: E731
        tokens, stats = generate(engines, policy, requests, gpu=gpu, opened_all=opened, **options)
    return Generated(tokens, stats, Counters.now().since(before[0]))
