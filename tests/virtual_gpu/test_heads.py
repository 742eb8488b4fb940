"""Draft heads on the virtual GPU: they draft from the target's hidden rows, which never leave the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from faser_trtllm.core.sampling_params import SamplingParams
from tests.support.effort import pick
from tests.support.networks import load_trt
from tests.virtual_gpu.heads import KINDS, checkpoints
from tests.virtual_gpu.plan_engines import build_engine_dir, generate_requests
from tests.virtual_gpu.process import VirtualGpuProcess

pytestmark = pytest.mark.slow

load_trt()  # networks are made with tensorrt_rtx
DRAFT, TARGET = "0+32", "32+100"
READS = {"engine/gpu/sampler/accept:sample", "engine/gpu/sampler/draft_state:read", "engine/gpu/boundary:prune"}
POLICIES = ["fixed:4", "fixed:3:ping_pong", "fixed:3:draft_ahead", "erratic"]
BUILDS = [
    *(("cuda", kind) for kind in KINDS),
    ("tensorrt", "eagle3"),
    *pick([], [("tensorrt", "medusa"), ("tensorrt", "mtp"), ("tensorrt_rtx", "eagle3")]),
]
# By default a policy for each.
RUNS = pick(
    list(zip(BUILDS, [POLICIES[n] for n in (3, 2, 0, 3, 1, 0, 3)], strict=False)),
    [(build, policy) for build in BUILDS for policy in POLICIES],
)
# Greedy or seeded in turn; prompts fit attention's narrow tile, since the wide one's sums differ in the last bit.
REQUESTS = [
    (
        [7 * i + j for j in range(3 + i)],
        SamplingParams(
            max_tokens=pick(6, 10) + i, end_ids=(), temperature=0.7 * (i % 2), seed=i, min_tokens=3 * (i == 4)
        ),
    )
    for i in range(6)
]


@pytest.fixture(scope="module")
def built(gpu: VirtualGpuProcess, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The backend, the head, the engines, and their tokens without speculation."""
    backend, kind = request.param
    root = tmp_path_factory.mktemp(f"{backend}_{kind}")
    target, draft = checkpoints(root, kind)
    path: Path = gpu.run(build_engine_dir, target, draft, root / "engines", backend, "bfloat16", mtp=kind == "mtp")
    return backend, kind, path, gpu.run(generate_requests, path, "off", REQUESTS).tokens


@pytest.mark.parametrize(("built", "policy"), RUNS, indirect=["built"])
def test_the_text_is_the_targets_own(gpu: VirtualGpuProcess, built, policy: str) -> None:
    """In bf16, in a random order of work; the host reads verdicts and drafts, and no hidden row."""
    backend, kind, path, alone = built
    found = gpu.run(generate_requests, path, policy, REQUESTS, seed=POLICIES.index(policy))
    assert found.tokens == alone
    assert found.stats["num_draft_tokens"] > 0
    # A random MTP layer's first draft is always wrong here, and those made ahead fall with it.
    assert found.stats["num_drafts"] > 0 or (kind, policy) == ("mtp", "fixed:3:draft_ahead")
    assert found.counters.reads().keys() <= READS
    draft, target = ("whole", "whole") if policy == "fixed:4" else (DRAFT, TARGET)
    assert found.counters.kernels(draft)["sample_rows"] > 0, "modes that overlap draft on the draft's side"
    if backend != "cuda":
        assert any(label.startswith("plan of") for label in found.counters.work[target])
    if policy == "erratic":
        assert found.stats["num_pruned_rows"] > 0
