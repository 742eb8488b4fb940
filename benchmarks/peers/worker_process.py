"""The bench's end of the pipe to a worker process, which loads once and runs on demand."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import benchmarks
import faser_trtllm
from faser_trtllm.errors import FaserError

# A thread pool that spins between rounds would slow the system under test.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
STDERR_TAIL_LINES = 3


class WorkerError(FaserError):
    """A worker failed. missing: it lacks a library that can be installed."""

    def __init__(self, message: str, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class WorkerProcess:
    """One worker. python: its interpreter, which needs the worker's libraries but not this package."""

    def __init__(self, module: str, work_dir: Path, python: Path | None, num_threads: int, timeout_s: float) -> None:
        """Start a module of benchmarks.peers.workers. work_dir: an existing folder for this worker only."""
        self.name = module
        self._timeout_s = timeout_s
        self._log = work_dir / "stderr.log"
        # Links to our packages only: the interpreter must not see libraries installed next to them.
        path = work_dir / "path"
        path.mkdir()
        for package in (faser_trtllm, benchmarks):
            (path / package.__name__).symlink_to(Path(str(package.__file__)).resolve().parent, target_is_directory=True)
        environment = os.environ | {
            "PYTHONPATH": str(path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment |= dict.fromkeys(THREAD_VARIABLES, str(num_threads))
        try:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    [str(python or sys.executable), "-m", f"benchmarks.peers.workers.{module}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=work_dir,
                    env=environment,
                )
        except OSError as error:
            raise WorkerError(f"the interpreter {python} cannot be started: {error.strerror}") from error
        self._buffer = b""

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for the reply; raise WorkerError if it fails, dies or is too slow."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._death()) from None
        reply: dict[str, Any] = json.loads(self._read_line())
        if not reply.pop("ok"):
            raise WorkerError(reply["error"], missing=reply["kind"] == "missing")
        return reply

    def memory_bytes(self) -> int:
        """Return resident memory, including pages of mapped files."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return 1024 * int(line.split()[1])

    def close(self) -> None:
        """End the process. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    self._process.kill()
                    raise WorkerError(f"no answer within {self._timeout_s:g} s")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise WorkerError(self._death())
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _death(self) -> str:
        status = self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines()[-STDERR_TAIL_LINES:]
        return f"the process ended with status {status}: {' | '.join(lines) or 'nothing on stderr'}"
