"""faser's commands on the virtual GPU, for every GPU backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from faser_trtllm.errors import ConfigError
from tests.support.checkpoints import make_pair
from tests.support.effort import pick
from tests.support.networks import load_trt
from tests.virtual_gpu.commands import run_faser
from tests.virtual_gpu.heads import KINDS, checkpoints
from tests.virtual_gpu.plan_engines import generate_texts
from tests.virtual_gpu.process import VirtualGpuProcess

pytestmark = pytest.mark.slow

load_trt()
LIMITS = ("--max_batch_size", "2", "--max_num_tokens", "64", "--max_seq_len", "128", "--max_draft_len", "2")


BUILDS = [
    *((backend, "pair") for backend in ("cuda", "tensorrt", "tensorrt_rtx")),
    ("tensorrt", "eagle3"),
    *pick([], [("tensorrt", "mtp"), *(("cuda", kind) for kind in KINDS)]),
]


@pytest.mark.parametrize(("backend", "drafts"), BUILDS)
def test_build_check_and_generate(gpu: VirtualGpuProcess, tmp_path: Path, backend: str, drafts: str) -> None:
    """With draft models and heads, and with a profile, by which `price` then decides."""
    if drafts == "pair":
        target, draft = make_pair(tmp_path / "checkpoints", num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64)
    else:
        target, draft = checkpoints(tmp_path / "checkpoints", drafts)
    drafter = ("--mtp",) if draft is None else ("--draft_checkpoint_dir", str(draft))
    directory = str(tmp_path / "engines")
    has_profile = backend == "tensorrt" or drafts != "pair"
    options = ("--backend", backend, "--exit_layers", "1", *LIMITS, *([] if has_profile else ["--no_profile"]))
    gpu.run(run_faser, "build", "--checkpoint_dir", str(target), *drafter, "--output_dir", directory, *options)
    assert gpu.run(run_faser, "check", "--engine_dir", directory).startswith("ok: every file has")
    if has_profile:
        profile = json.loads((tmp_path / "engines" / "profile.json").read_text())
        assert profile["fingerprint"]["cpu_model"] == "virtual GPU"
    generate = ("generate", "--engine_dir", directory, "--prompt", "The", "--max_tokens", "8")
    for sampling in (("--temperature", "0"), ("--temperature", "0.8", "--seed", "3")):
        alone, drafted = (
            gpu.run(run_faser, *generate, *sampling, "--speculation", speculation)
            for speculation in ("off", "price:prune=on" if has_profile and drafts == "pair" else "fixed:2")
        )
        assert alone.strip()
        assert drafted == alone


@pytest.mark.parametrize("backend", ["tensorrt", *pick([], ["cuda", "tensorrt_rtx"])])
def test_a_target_alone_speculates_from_its_own_text(gpu: VirtualGpuProcess, tmp_path: Path, backend: str) -> None:
    """It does so by default, and by its profile, which has no steps of a draft model."""
    target, _ = make_pair(tmp_path / "checkpoints", num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64)
    directory = tmp_path / "engines"
    has_profile = backend == "tensorrt"
    options = ("--backend", backend, "--exit_layers", "1", *LIMITS, *([] if has_profile else ["--no_profile"]))
    gpu.run(run_faser, "build", "--checkpoint_dir", str(target), "--output_dir", str(directory), *options)
    assert gpu.run(run_faser, "check", "--engine_dir", str(directory)).startswith("ok: every file has")
    if has_profile:
        kinds = {each["kind"] for each in json.loads((directory / "profile.json").read_text())["samples"]}
        assert "verify" in kinds
        assert not any(kind.startswith("draft") for kind in kinds)
    alone = gpu.run(generate_texts, directory, "off", ["a b a b a b"])
    for policy in ("auto", "fixed:2", *(["price", "price:prune=on"] if has_profile else [])):
        found = gpu.run(generate_texts, directory, policy, ["a b a b a b"])
        assert found.tokens == alone.tokens
        assert found.stats["num_passed_drafts_suffix"] > 0 or policy.startswith("price")
    generate = ("generate", "--engine_dir", str(directory), "--prompt", "a b a b", "--max_tokens", "8")
    texts = [
        gpu.run(run_faser, *generate, "--temperature", "0", "--speculation", policy) for policy in ("off", "fixed:2")
    ]
    assert texts[0] == texts[1] != ""


def test_the_command_line_runs_a_command() -> None:
    run = [sys.executable, "-m", "tests.virtual_gpu"]
    done = subprocess.run([*run, "faser", "version"], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout.startswith("faser")) == (0, True), done.stderr
    done = subprocess.run(run, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stderr) == (1, "usage: python -m tests.virtual_gpu faser COMMAND ...\n")


def test_one_gpu_is_too_few_for_two_ranks(gpu: VirtualGpuProcess, tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path / "checkpoints", num_layers=1, num_heads=2, num_kv_heads=2, head_dim=64)
    models = ("--checkpoint_dir", str(target), "--draft_checkpoint_dir", str(draft))
    options = ("--output_dir", str(tmp_path / "engines"), "--backend", "cuda", "--tp_size", "2", "--no_profile")
    gpu.run(run_faser, "build", *models, *options, *LIMITS)
    with pytest.raises(
        ConfigError,
        match=r"^rank 1 needs a GPU of its own, and this machine has 1; build with a --tp_size of at most 1",
    ):
        gpu.run(generate_texts, tmp_path / "engines", "off", ["The"])
