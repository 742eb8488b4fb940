"""Draft heads beside TensorRT plans on the virtual GPU: plans give hidden rows, which never leave the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faser_trtllm.core.sampling_params import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3 import make_head
from tests.support.effort import pick
from tests.support.medusa import make_medusa
from tests.support.mtp import make_mimo
from tests.support.networks import load_trt
from tests.virtual_gpu.plan_engines import build_engine_dir, generate_requests
from tests.virtual_gpu.process import VirtualGpuProcess

pytestmark = pytest.mark.slow

load_trt()  # networks are made with tensorrt_rtx
DRAFT, TARGET = "0+32", "32+100"
POLICIES = [*pick([], ["fixed:4", "fixed:3:ping_pong", "fixed:3:draft_ahead"]), "erratic"]
# Greedy or seeded in turn.
REQUESTS = [
    ([7 * i + j for j in range(3 + i)], SamplingParams(max_tokens=10, end_ids=(), temperature=0.7 * (i % 2), seed=i))
    for i in range(5)
]
SIZES: dict[str, Any] = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
# The embedding, a layer behind an exit, and what leaves the last.
LAYERS = (0, 1, 3)
BUILDS = [("tensorrt", "eagle3"), *pick([], [("tensorrt", "medusa"), ("tensorrt", "mtp"), ("tensorrt_rtx", "eagle3")])]


def checkpoints(root: Path, kind: str) -> tuple[Path, Path | None]:
    if kind == "mtp":
        return make_mimo(root / "t", **SIZES), None
    target = make_checkpoint(root / "t", **SIZES)
    if kind == "medusa":
        return target, make_medusa(root / "h", target, num_heads=4)
    return target, make_head(root / "h", target, layers=LAYERS, draft_vocab_size=200)


@pytest.fixture(scope="module", params=BUILDS, ids=" ".join)
def engine_dir(
    gpu: VirtualGpuProcess, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    backend, kind = request.param
    root = tmp_path_factory.mktemp(f"{backend}_{kind}")
    target, draft = checkpoints(root, kind)
    return gpu.run(build_engine_dir, target, draft, root / "engines", backend, "bfloat16", mtp=kind == "mtp")


@pytest.mark.parametrize("policy", POLICIES)
def test_speculation_changes_no_token(gpu: VirtualGpuProcess, engine_dir: Path, policy: str) -> None:
    alone = gpu.run(generate_requests, engine_dir, "off", REQUESTS)
    found = gpu.run(generate_requests, engine_dir, policy, REQUESTS, seed=POLICIES.index(policy))
    assert found.tokens == alone.tokens
    assert found.stats["num_draft_tokens"] > 0
    draft, target = ("whole", "whole") if policy == "fixed:4" else (DRAFT, TARGET)
    assert any(label.startswith("plan of") for label in found.counters.work[target])
    assert found.counters.kernels(draft)["sample_rows"] > 0
    if policy == "erratic":
        assert found.stats["num_pruned_rows"] > 0
    assert found.counters.reads().keys() <= {
        "engine/gpu/sampler/accept:run",
        "engine/gpu/sampler/draft_state:read",
        "engine/gpu/boundary:prune",
    }
