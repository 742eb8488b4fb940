"""A section of `faser bench gpu` on the virtual GPU: full TensorRT with our plugins, by the stand-in builder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import make_pair
from tests.support.effort import ONLY_ALL
from tests.support.networks import load_trt

load_trt()  # networks are made with tensorrt_rtx
SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "vocab_size": 300}


def run_command(output_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "tests.virtual_gpu", "faser", "bench", "gpu", "--output_dir", str(output_dir))
    return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=Path(__file__).parents[2])


@ONLY_ALL
@pytest.mark.slow
def test_the_command_runs_its_sections_on_the_device(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path / "pair", **SIZES)  # type: ignore[arg-type]
    models = ("--checkpoint_dir", str(target), "--draft_checkpoint_dir", str(draft), "--forms", "8B-128k")
    names = "environment,kernels,gemms,steps,row_counts,breakdown,host_profile,partitions"
    sections = ("--sections", names)
    command = (
        sys.executable,
        "-m",
        "tests.virtual_gpu",
        "faser",
        "bench",
        "gpu",
        "--output_dir",
        str(tmp_path / "out"),
    )
    done = subprocess.run(
        [*command, *models, *sections, "--dry_run"], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())["sections"]
    status = {name: section["status"] for name, section in found.items()}
    assert status.pop("partitions").startswith("skipped: it asks torch for CUDA itself")
    assert set(status.values()) == {"ok"}, status
    (versions,) = (t["rows"] for t in found["environment"]["tables"] if t["title"] == "Versions and device")
    assert dict(versions)["sms"] == "132"  # the virtual GPU's
    titles = [table["title"] for table in found["kernels"]["tables"]]
    assert {"verify_attention", "append_kv", "accept"} <= set(titles)


def test_the_command_asks_for_tiny_shapes(tmp_path: Path) -> None:
    done = run_command(tmp_path)
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "bench gpu needs --dry_run here: the virtual GPU is too slow for the shapes of real models",
    )
