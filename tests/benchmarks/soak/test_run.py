"""`faser bench soak` over real engines: load with deadlines and kills, and a loss that it cannot explain.

A run for a release takes longer: `faser bench soak --engine_dir engines/built/demo --minutes 20 --output_dir ...`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.soak.watch import ServiceProcesses
from tests.support.effort import ONLY_ALL
from tests.support.engine_dirs import make_engine_dir

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_S = 600  # of a soak of a minute, on a machine that runs other tests


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"max_batch_size": 16, "max_seq_len": 256, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), **sizes)


def soak(engine_dir: Path, output_dir: Path, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "faser_trtllm.cli", "bench", "soak", "--engine_dir", str(engine_dir)]
    flags = [f"--{name}={value}" for name, value in options.items()]
    return subprocess.Popen(
        [*command, "--output_dir", str(output_dir), "--models=faser", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@ONLY_ALL
def test_a_service_stands_load_cancellations_bad_input_and_kills(engine_dir: Path, tmp_path: Path) -> None:
    with soak(
        engine_dir,
        tmp_path,
        minutes=0.9,
        storm_minutes=0.5,
        warmup_s=4,
        kill_period_s=5,
        max_recovery_s=15,
        max_growth_mib=256,
    ) as process:
        output, log = process.communicate(timeout=MAX_S)
    assert process.returncode == 0, output + log
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["has_passed"]
    assert [kill["role"] for kill in report["kills"]].count("tritonserver") == 2
    assert [kill["role"] for kill in report["kills"]].count("engine") >= 1
    assert all(kill["recovery_s"] > 0 for kill in report["kills"])
    endings = {(row["transport"], row["ending"]) for row in report["requests"]}
    for transport in ("grpc", "http"):
        assert {
            (transport, "finished"),
            (transport, "cancelled"),
            (transport, "refused"),
            (transport, "timed out"),
        } <= endings
    assert ("grpc", "lost to a kill") in endings
    assert report["cancelled_before_first_token"] > 0
    assert ("grpc", "served") in endings
    lives = {growth["role"]: growth["num_lives"] for growth in report["growths"]}
    assert lives["launcher"] == lives["tritonserver"] == 1, "in the calm"
    assert str(engine_dir) not in json.dumps(report)
    assert "**Passed.**" in output
    assert "| memory of tritonserver is flat |" in output
    assert (tmp_path / "soak.png").stat().st_size > 10_000


@ONLY_ALL
def test_a_loss_that_no_kill_explains_is_exit_code_1(engine_dir: Path, tmp_path: Path) -> None:
    with soak(engine_dir, tmp_path, minutes=0.4, warmup_s=1, kill_period_s=0, max_growth_mib=256) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("load for"):
                break
        (launcher_pid,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        engine_pid = ServiceProcesses(launcher_pid).engine_pid()
        assert engine_pid is not None
        time.sleep(4.0)  # so that requests are open
        os.kill(engine_pid, signal.SIGKILL)
        output, log = process.communicate(timeout=MAX_S)
    assert process.returncode == 1, output + log
    report = json.loads((tmp_path / "soak.json").read_text())
    failed = [condition["name"] for condition in report["conditions"] if not condition["is_met"]]
    assert "every request ended as it may, warm-up included" in failed
    assert any("the engine process" in reason for reason in report["failures"])
    assert "**FAILED.**" in output
