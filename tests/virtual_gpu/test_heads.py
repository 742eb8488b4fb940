"""Draft heads on the virtual GPU: they draft from the target's hidden rows, which never leave the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.core.sampling_params import SamplingParams
from tests.engine.cuda.harness import HEADS, build_with_head
from tests.support.checkpoints import make_checkpoint
from tests.support.eagle3 import make_head
from tests.support.effort import pick
from tests.support.medusa import make_medusa
from tests.support.mtp import make_mimo
from tests.virtual_gpu.commands import run_faser
from tests.virtual_gpu.generation import generate_cuda
from tests.virtual_gpu.process import VirtualGpuProcess

pytestmark = pytest.mark.slow

POLICIES = ["fixed:4", "fixed:3:ping_pong", "fixed:3:draft_ahead", "erratic"]
RUNS = pick(
    [("eagle3", "erratic"), ("medusa", "fixed:3:draft_ahead"), ("mtp", "fixed:4")],
    [(kind, policy) for kind in HEADS for policy in POLICIES],
)
TEST, DRAFTS, PRUNE = (
    "engine/gpu/sampler/accept:run",
    "engine/gpu/sampler/draft_state:read",
    "engine/gpu/boundary:prune",
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
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineDir]:
    """By kind of head."""
    root = tmp_path_factory.mktemp("heads")
    return {kind: build_with_head(root / kind, exit_layers=(2,), **options) for kind, options in HEADS.items()}


@pytest.fixture(scope="module")
def alone(gpu: VirtualGpuProcess, engines: dict[str, EngineDir]) -> Callable[[str], list[list[int]]]:
    """Of a kind's target, which but for an MTP layer's is the same."""

    @functools.cache
    def tokens(is_mtp: bool) -> list[list[int]]:
        return gpu.run(generate_cuda, engines["mtp" if is_mtp else "eagle3"], "off", REQUESTS).tokens

    return lambda kind: tokens(kind == "mtp")


@pytest.mark.parametrize(("kind", "policy"), RUNS)
def test_the_text_is_the_targets_own(
    gpu: VirtualGpuProcess,
    engines: dict[str, EngineDir],
    alone: Callable[[str], list[list[int]]],
    kind: str,
    policy: str,
) -> None:
    """In bf16, in a random order of work; the host reads verdicts and drafts, and no hidden row."""
    found = gpu.run(generate_cuda, engines[kind], policy, REQUESTS, seed=POLICIES.index(policy))
    assert found.tokens == alone(kind)
    assert found.stats["num_draft_tokens"] > 0
    # A random MTP layer's first draft is always wrong here, and those made ahead fall with it.
    assert found.stats["num_drafts"] > 0 or (kind, policy) == ("mtp", "fixed:3:draft_ahead")
    assert found.counters.reads().keys() <= {TEST, DRAFTS, PRUNE}
    sides = found.counters.kernels("0+32"), found.counters.kernels("32+100")
    assert ("sample_rows" in sides[0]) is (policy != "fixed:4"), "modes that overlap draft on the draft's side"
    if policy == "erratic":
        assert found.stats["num_pruned_rows"] > 0


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("tensorrt", "eagle3"),
        *pick([], [("cuda", kind) for kind in HEADS]),
        *pick([], [("tensorrt", "mtp")]),
    ],
)
def test_build_check_profile_and_generate(gpu: VirtualGpuProcess, tmp_path: Path, backend: str, kind: str) -> None:
    sizes = {"num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    target = (make_mimo if kind == "mtp" else make_checkpoint)(tmp_path / "t", **sizes)
    drafters = {
        "eagle3": lambda: make_head(tmp_path / "h", target, layers=(0, 1, 3), draft_vocab_size=200),
        "medusa": lambda: make_medusa(tmp_path / "h", target),
    }
    drafter = ("--mtp",) if kind == "mtp" else ("--draft_checkpoint_dir", str(drafters[kind]()))
    models = ("--checkpoint_dir", str(target), *drafter)
    directory = str(tmp_path / "engines")
    limits = ("--max_batch_size", "2", "--max_num_tokens", "64", "--max_seq_len", "128", "--max_draft_len", "2")
    gpu.run(run_faser, "build", *models, "--output_dir", directory, "--backend", backend, *limits)
    assert (tmp_path / "engines" / "profile.json").exists()
    assert gpu.run(run_faser, "check", "--engine_dir", directory).startswith("ok: every file has")
    generate = ("generate", "--engine_dir", directory, "--prompt", "The", "--max_tokens", "8")
    for sampling in (("--temperature", "0"), ("--temperature", "0.8", "--seed", "3")):
        alone, drafted = (
            gpu.run(run_faser, *generate, *sampling, "--speculation", speculation) for speculation in ("off", "fixed:2")
        )
        assert alone.strip()
        assert drafted == alone
