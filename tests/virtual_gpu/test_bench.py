"""A section of `faser bench gpu` on the virtual GPU: full TensorRT with our plugins, by the stand-in builder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_pair
from tests.support.effort import ONLY_ALL
from tests.support.networks import load_trt
from tests.virtual_gpu.process import VirtualGpuProcess

load_trt()  # networks are made with tensorrt_rtx
SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "vocab_size": 300}


def run_section(root: Path) -> dict[str, Any]:
    """In the process with the virtual GPU, which is left to itself: the suite's sizes are too large for it."""
    from benchmarks.gpu import machine
    from benchmarks.gpu.backends import built, section, soak
    from benchmarks.gpu.models import prompts
    from benchmarks.gpu.options import GpuBenchOptions
    from benchmarks.gpu.report.record import Record
    from benchmarks.gpu.section_process import run_entry

    machine.CLOCK_SIZE, machine.CLOCK_S = 32, 0.0
    built.LIMITS, prompts.NUM_PROMPTS = built.DRY_LIMITS, 3
    soak.NUM_LAPS, soak.JOBS_PER_LAP = soak.WARM_LAPS + 1, 1
    section.SETTINGS = ("fixed:4,mode=ping_pong",)
    section.check_installed = lambda bench, backend: None  # there is no module: the builder is a stand-in
    target, draft = make_pair(root / "pair", **SIZES)  # type: ignore[arg-type]
    options = GpuBenchOptions(target, draft, root / "out", max_tokens=6, prompt_len=12)
    (root / "out").mkdir()
    record = Record()
    run_entry("benchmarks.gpu.backends.section:run_tensorrt", options, record, 600.0)
    return record.data


@ONLY_ALL
def test_tensorrt_with_plugins_says_what_cuda_says(gpu: VirtualGpuProcess, tmp_path: Path) -> None:
    found = gpu.run(run_section, tmp_path)
    assert found["status"] == "ok", (found["status"], found["errors"])
    tables = {table["title"]: table["rows"] for table in found["tables"]}
    built = dict(tables["The trained pair, built"])
    assert "faser::verify_attention: 3" in built["plugins, in so many plans"]
    assert "stand-in" in built["TensorRT"]
    ((num_rows, *_, num_far),) = tables["Logits against those of cuda, by row"]
    assert (num_rows, num_far) == ("18", "0")
    pruned = {row[0]: int(row[2]) for row in tables["Greedy tokens against those without speculation"]}
    assert pruned["pruned, serial"] > 0
    assert found["values"]["memory growth MiB"] == 0


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
