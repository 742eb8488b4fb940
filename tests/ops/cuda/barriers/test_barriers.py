"""Barriers of the kernels: ThreadSanitizer reports no race over the emulator, and the absence of any one is found."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from faser_trtllm.ops.cuda.compiler import stems
from tests.ops.cuda.barriers.mutants import NOT_REACHED, NOTHING
from tests.ops.cuda.barriers.places import Place, barriers, other_waits, untested
from tests.ops.cuda.emulation import host_compiler, skip_without_a_compiler
from tests.ops.cuda.kernel_cases import CASES
from tests.support.effort import pick

ROOT = Path(__file__).parents[4]
SOME_STEMS = ("prune_rows",)
STEMS = pick(SOME_STEMS, tuple(CASES))
PLACES = pick([next(p for p in barriers() if p.file == f"{stem}.cu") for stem in SOME_STEMS], barriers())
# A race ends the process; torch's own threads and memory are none of this.
OPTIONS = "halt_on_error=1:ignore_noninstrumented_modules=1:report_signal_unsafe=0:history_size=0"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@functools.cache
def sanitized() -> list[str]:
    """How to start a process with ThreadSanitizer loaded; the test is skipped where there can be none."""
    skip_without_a_compiler()
    compiler = str(host_compiler())
    defined = _output(compiler, "-fsanitize=thread", "-dM", "-E", "-x", "c++", os.devnull)
    library = _output(compiler, "-print-file-name=libtsan.so").strip()
    if "__SANITIZE_THREAD__" not in defined or not Path(library).is_absolute():
        pytest.skip(f"{compiler} is not gcc with ThreadSanitizer's library; install g++ and libtsan, or set CXX")
    loaded = ["env", f"LD_PRELOAD={library}", f"TSAN_OPTIONS={OPTIONS}", "OMP_NUM_THREADS=1"]
    # Some versions of the library cannot bear how randomly some kernels place memory; some sandboxes refuse setarch.
    for command in (["setarch", "-R", *loaded], loaded):
        if shutil.which(command[0]) and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    pytest.skip(f"{library} does not start here, with or without address space randomization")


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    """The process of mutants.py, once for all tests, also if it takes too long."""
    arguments = [json.dumps(STEMS), json.dumps(PLACES)]
    command = [*sanitized(), sys.executable, "-m", "tests.ops.cuda.barriers.mutants", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def test_no_kernel_has_a_race(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-10_000:]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_absence_of_a_barrier_is_found(done: subprocess.CompletedProcess[str], place: Place) -> None:
    assert done.returncode == 0, "the kernels as they are have not run"
    seen = json.loads(done.stdout)[str(place)]
    assert seen not in (NOTHING, NOT_REACHED), "take the barrier out, or let a case of kernel_cases.py show the need"


def test_every_kernel_and_barrier_is_known() -> None:
    assert sorted(CASES) == sorted(stems())
    assert len(untested()) == 2, "say in the change why no case can show the need of one more"
    assert other_waits() == [], "waits that tests cannot leave out; teach places.py and the emulator"
