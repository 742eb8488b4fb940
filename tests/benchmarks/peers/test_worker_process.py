"""Workers that answer, complain, crash, hang or talk too much."""

import os
import stat
import sys
from pathlib import Path

import pytest

from benchmarks.peers.worker_process import WorkerError, WorkerProcess

WORKER = """
import os, sys, time
from benchmarks.peers.workers.protocol import serve

class System:
    def load(self, request):
        if request.get("missing"):
            import a_library_that_is_not_there
        print("chatter on stdout")
        os.write(1, b"more of it, from native code\\n")
        return {"threads": os.environ["OMP_NUM_THREADS"], "cores": str(sorted(os.sched_getaffinity(0)))}
    def generate(self, setting, prompts, max_tokens, counts):
        if setting == "crash":
            print("about to crash", file=sys.stderr, flush=True)
            os._exit(3)
        if setting == "hang":
            time.sleep(60)
        if setting == "fail":
            raise RuntimeError("no can do")
        counts.num_target_passes += len(prompts)
        return [[sum(prompt)] * max_tokens for prompt in prompts]
    def steps(self, num_rows, num_repeats):
        return {rows: float(rows) for rows in num_rows}

serve(System())
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """An interpreter that runs the worker above whatever module it is told to run."""
    (tmp_path / "worker.py").write_text(WORKER)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/worker.py"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def start(interpreter: Path, timeout_s: float = 30.0) -> WorkerProcess:
    folder = interpreter.parent / "work"
    folder.mkdir()
    return WorkerProcess("any", folder, interpreter, num_threads=1, timeout_s=timeout_s)


def test_load_and_run(interpreter: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with start(interpreter) as worker:
        versions = worker.call("load", cores=[core])["versions"]
        assert versions == {"threads": "1", "cores": str([core])}
        reply = worker.call("run", setting="x", prompts=[[1, 2], [3, 4], [5, 6]], batch_size=2, max_tokens=2)
        assert reply["token_ids"] == [[3, 3], [7, 7], [11, 11]]
        assert len(reply["seconds"]) == 2
        assert reply["num_target_passes"] == 3
        assert worker.call("steps", num_rows=[1, 4], num_repeats=1)["steps_ms"] == {"1": 1.0, "4": 4.0}


def test_missing_library_is_told_apart(interpreter: Path) -> None:
    with (
        start(interpreter) as worker,
        pytest.raises(WorkerError, match="a_library_that_is_not_there") as caught,
    ):
        worker.call("load", cores=[min(os.sched_getaffinity(0))], missing=True)
    assert caught.value.missing


def run(worker: WorkerProcess, setting: str) -> None:
    worker.call("run", setting=setting, prompts=[[1]], batch_size=1, max_tokens=1)


def test_failure_does_not_end_the_worker(interpreter: Path) -> None:
    with start(interpreter) as worker:
        with pytest.raises(WorkerError, match="RuntimeError: no can do") as caught:
            run(worker, "fail")
        assert not caught.value.missing
        run(worker, "fine")


def test_crash_shows_status_and_stderr(interpreter: Path) -> None:
    with start(interpreter) as worker:
        with pytest.raises(WorkerError, match="status 3: about to crash"):
            run(worker, "crash")
        with pytest.raises(WorkerError, match="status 3"):
            run(worker, "fine")


def test_hang_is_killed(interpreter: Path) -> None:
    with start(interpreter, timeout_s=0.5) as worker, pytest.raises(WorkerError, match=r"within 0\.5 s"):
        run(worker, "hang")


def test_no_such_interpreter(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="cannot be started"):
        WorkerProcess("hf", tmp_path, tmp_path / "nothing", num_threads=1, timeout_s=1.0)


def test_workers_need_nothing_of_the_package(tmp_path: Path) -> None:
    """An interpreter without our dependencies gets as far as the peer's own library."""
    (tmp_path / "work").mkdir()
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    script.chmod(0o755)
    with (
        WorkerProcess("hf", tmp_path / "work", script, num_threads=1, timeout_s=30.0) as worker,
        pytest.raises(WorkerError, match="torch") as caught,
    ):
        worker.call("load", cores=[min(os.sched_getaffinity(0))])
    assert caught.value.missing
