"""The fuzz targets of the native code: their kept inputs and some mutations of them, without libFuzzer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.effort import pick
from tests.support.native_build import FUZZ_TARGETS, NativeBuild
from tests.support.native_corpus import unpack


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", FUZZ_TARGETS)
def test_nothing_is_found(target: str, tmp_path: Path) -> None:
    build = NativeBuild("address,undefined")
    if reason := build.why_not():
        pytest.skip(reason)
    command = [str(build.program(target)), f"-max_total_time={pick(1, 60)}", str(unpack(target, tmp_path / "corpus"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-8000:]
    num_files = int(done.stdout.split()[0])
    assert num_files > 0, "a target has inputs to begin with"
