"""GPUs that TensorRT for RTX refuses are named before anything is built or loaded; the GPU is a stand-in driver's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.builder.network.vendor import rtx_refusal
from faser_trtllm.errors import InvalidArgumentError
from tests.support.checkpoints import make_checkpoint
from tests.virtual_gpu.device.library import driver_library, why_not

NVIDIA_SAYS = '"Supported compute capabilities: 8.0 8.6 8.9 12.0 12.1 >12.0"'


def faser(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command on a machine whose libcuda.so.1, if the folder has one, is the stand-in."""
    return subprocess.run(
        [sys.executable, "-m", "faser_trtllm.cli", *arguments],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "libcuda.so.1").symlink_to(driver_library())
    return folder


def build_arguments(tmp_path: Path, *more: str) -> tuple[str, ...]:
    """There is no checkpoint: what is refused later than it says of that."""
    options = ("--checkpoint_dir", str(tmp_path / "none"), "--output_dir", str(tmp_path / "engines"))
    return "build", *options, "--backend", "tensorrt_rtx", *more


def test_a_build_on_a_hopper_machine_is_refused_at_once(library: Path, tmp_path: Path) -> None:
    done = faser(library, *build_arguments(tmp_path), LIBCUDA_MAJOR="9")
    assert done.returncode == 2
    assert "the GPU here, virtual GPU, has compute capability 9.0" in " ".join(done.stderr.split())
    assert NVIDIA_SAYS in " ".join(done.stderr.split())
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize(
    ("more", "environment"),
    [
        ((), {"LIBCUDA_MAJOR": "12"}),
        ((), {"LIBCUDA_MAJOR": "8"}),
        ((), {"LIBCUDA_FAILS": "cuInit"}),  # no GPU: the plans are for another machine
        (("--compute_capability", "8.9"), {"LIBCUDA_MAJOR": "9"}),
    ],
)
def test_other_builds_go_on(library: Path, tmp_path: Path, more: tuple[str, ...], environment: dict[str, str]) -> None:
    pytest.importorskip("tensorrt_rtx")
    done = faser(library, *build_arguments(tmp_path, *more), **environment)
    assert "compute capability" not in done.stderr
    assert "none" in done.stderr, "the checkpoint is what is missing"


def test_a_hopper_that_is_asked_for_is_refused(tmp_path: Path) -> None:
    options = BuildOptions(
        tmp_path / "none", None, tmp_path / "engines", backend="tensorrt_rtx", compute_capabilities=("8.9", "9.0")
    )
    with pytest.raises(InvalidArgumentError) as caught:
        build_engines(options)
    assert str(caught.value) == (
        f"compute_capability has 9.0, and TensorRT for RTX refuses such GPUs in its own words: {NVIDIA_SAYS}; use "
        "--backend cuda or tensorrt for it"
    )


def test_engines_are_not_loaded_on_a_hopper(library: Path, tmp_path: Path) -> None:
    """A directory of another backend, relabeled: nothing of it is read before the refusal."""
    target = make_checkpoint(tmp_path / "target", num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64)
    engines = build_engines(BuildOptions(target, None, tmp_path / "engines", backend="cuda", max_num_tokens=32))
    assert engines is not None
    path = engines.path / "manifest.json"
    manifest = json.loads(path.read_text()) | {"backend": "tensorrt_rtx"}
    path.write_text(json.dumps(manifest))
    generate = ("generate", "--engine_dir", str(engines.path), "--prompt", "a", "--speculation", "off")
    for major, is_refused in (("9", True), ("12", False)):
        done = faser(library, *generate, LIBCUDA_MAJOR=major)
        assert done.returncode != 0, "neither loads"
        assert (NVIDIA_SAYS in " ".join(done.stderr.split())) == is_refused, done.stderr


@pytest.mark.parametrize(
    ("capability", "is_refused"),
    [("8.0", False), ("8.9", False), ("9.0", True), ("10.0", True), ("11.0", True), ("12.0", False), ("12.1", False)],
)
def test_what_lies_between_is_refused(capability: str, is_refused: bool) -> None:
    assert bool(rtx_refusal(capability)) is is_refused
