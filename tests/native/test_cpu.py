"""plugins/cpu under ASan, UBSan and TSan: passes, drafting, rejection sampling, and files that are damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faser_trtllm.models.experts import SOFTMAX, ExpertsConfig
from tests.support.effort import ONLY_ALL, pick
from tests.support.native_build import ROOT, NativeBuild
from tests.support.tiny_model import TinyConfig, TinyModel

SANITIZERS = ("address,undefined", "thread")


def _build(sanitize: str) -> NativeBuild:
    build = NativeBuild(sanitize)
    if reason := build.why_not():
        pytest.skip(reason)
    return build


def _drive(sanitize: str, isa: str | None = None) -> str:
    environment = os.environ | ({} if isa is None else {"FASER_CPU_ISA": isa})
    command = [str(_build(sanitize).program("drive_cpu")), f"--seconds={pick(2, 60)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, env=environment)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_models_of_all_kinds_run_on_any_number_of_threads(sanitize: str) -> None:
    """Quantizations, heads, segments, early exits and drafting; bits do not depend on threads."""
    assert " models on " in _drive(sanitize)


@ONLY_ALL
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("isa", ["avx512bf16", "avx2", "portable"])
@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_lower_instruction_sets(sanitize: str, isa: str) -> None:
    found = _drive(sanitize, isa).split()[-1]
    if found != isa:
        pytest.skip(f"FASER_CPU_ISA={isa} runs {found} here")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_engine_files_open_and_run_or_are_refused(tmp_path: Path) -> None:
    """Whole files, and files with changed headers and data, through Python's reader and the sanitized library."""
    build = _build("address,undefined")
    library = build.program("libfaser_cpu.so")
    preload = " ".join(_runtime(build, name) for name in ("libasan.so", "libubsan.so"))
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1",
        "PYTHONPATH": str(ROOT),
    }
    files = []
    for number, scheme in enumerate(("none", "int8", "int4:32", "W8A8")):
        config = TinyConfig(num_layers=2, hidden_size=128, intermediate_size=128, quantization=scheme, seed=number)
        files.append(str(TinyModel(config).write(tmp_path / f"{number}.engine")))
    experts = ExpertsConfig(6, 2, 64, SOFTMAX, norm_topk=True, shared_size=32)
    config = TinyConfig(num_layers=2, hidden_size=64, intermediate_size=64, quantization="int4:32", experts=experts)
    files.append(str(TinyModel(config).write(tmp_path / "experts.engine")))
    command = [sys.executable, "-m", "tests.native.cpu.mutated_files", str(library), str(pick(150, 3000)), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-8000:]
    num_run, num_refused = map(int, done.stdout.split()[-2:])
    assert num_run > 0
    assert num_refused > 0


def _runtime(build: NativeBuild, name: str) -> str:
    command = [build.compiler, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
