"""How commands end that open GPU engines: as processes of their own, whose status says whether something aborted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_pair
from tests.support.effort import pick
from tests.support.triton_server import Server
from tests.support.waiting import wait_until
from tests.virtual_gpu.__main__ import COUNTERS
from tests.virtual_gpu.device.library import why_not

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "tests.virtual_gpu", "faser")
LIMITS = ("--max_batch_size", "2", "--max_num_tokens", "64", "--max_seq_len", "128", "--max_draft_len", "2")
GENERATE = ("generate", "--prompt", "The", "--max_tokens", "40", "--temperature", "0", "--speculation", "fixed:2")
INTERRUPTED = 130


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """The status of a command and what it said."""
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, check=False
    )
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    if reason := why_not():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("pair")
    target, draft = make_pair(directory, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64)
    return "--checkpoint_dir", str(target), "--draft_checkpoint_dir", str(draft)


@pytest.fixture(scope="module")
def engine_dir(pair: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the command, with the profile that it ends with."""
    directory = tmp_path_factory.mktemp("engines") / "pair"
    status, said = run("build", "--backend", "cuda", *pair, "--output_dir", str(directory), *LIMITS)
    assert status == 0, said
    return directory


def test_a_build_profiles_its_engines(engine_dir: Path) -> None:
    profile = json.loads((engine_dir / "profile.json").read_text())
    assert profile["fingerprint"]["cpu_model"] == "virtual GPU"
    assert {"verify", "draft_step", "draft_rows"} <= {sample["kind"] for sample in profile["samples"]}


@pytest.mark.parametrize(
    "command",
    [
        ("check",),
        ("profile", "--quick"),
        (*GENERATE, "--speculation", "auto"),
        (*GENERATE, "--speculation", "fixed:2,mode=ping_pong"),
    ],
)
def test_commands_end_with_status_0(engine_dir: Path, command: tuple[str, ...]) -> None:
    status, said = run(*command, "--engine_dir", str(engine_dir))
    assert status == 0, said


def test_the_bench_ends_with_status_0(pair: tuple[str, ...], tmp_path: Path) -> None:
    sections = ("--dry_run", "--sections", pick("steps", "steps,costs,exactness"), "--forms", "1B")
    status, said = run("bench", "gpu", *pair, *sections, "--output_dir", str(tmp_path / "out"))
    assert status == 0, said
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())["sections"]
    assert {section["status"] for section in found.values()} == {"ok"}


@pytest.mark.triton
def test_a_server_ends_with_status_0(engine_dir: Path, tmp_path: Path) -> None:
    command = (*COMMAND, "serve", "--models", "faser", "--speculation", "fixed:2")
    with Server(engine_dir, command=command, log=tmp_path / "log") as server:
        server.wait_ready()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.output()
        assert "the engine process ended with status" not in server.output()


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        ("cuMemAllocAsync:30", "cuMemAllocAsync failed with CUDA_ERROR_OUT_OF_MEMORY"),  # while engines are opened
        ("cuGraphLaunch:6", "failed with CUDA_ERROR_LAUNCH_FAILED"),  # in a step, and with every call after it
    ],
)
def test_an_error_ends_a_command_with_its_status(engine_dir: Path, failing: str, error: str) -> None:
    status, said = run(*GENERATE, "--engine_dir", str(engine_dir), VIRTUAL_GPU_FAILS=failing)
    assert (status, said.startswith("faser: ")) == (2, True), said
    assert error in said


@pytest.mark.parametrize("during", ["opening", "steps"])
def test_ctrl_c_ends_a_command_as_it_should(engine_dir: Path, tmp_path: Path, during: str) -> None:
    counters = tmp_path / "counters.json"
    # Enough tokens for the command to be still running when the signal comes.
    command = (*COMMAND, *GENERATE, "--max_tokens", "120", "--engine_dir", str(engine_dir))
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, env=os.environ | {COUNTERS: str(counters)}) as run:
        try:
            wait_until(lambda: _counted(counters).get("work" if during == "opening" else "graphs"))
            run.send_signal(signal.SIGINT)
            _, said = run.communicate()
            assert (run.returncode, said) == (INTERRUPTED, b"")
        finally:
            run.kill()


def _counted(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found
