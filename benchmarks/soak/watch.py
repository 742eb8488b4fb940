"""Watch the processes of a service from outside: memory, file descriptors, threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.serving.launch.process import PARENT_OPTION, command_line, session_pids

ENGINE, LAUNCHER, SERVER = "engine", "launcher", "tritonserver"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessSample:
    """A sample of a process. rss_bytes: resident memory with shared pages. anon_bytes: its part without a file."""

    pid: int
    rss_bytes: int
    anon_bytes: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True)
class Sample:
    """One sample. processes: by role, such as "engine"."""

    at_s: float
    processes: dict[str, ProcessSample]
    num_tokens: int = 0


class ServiceProcesses:
    """The processes of one running `faser serve`, identified by their command lines."""

    def __init__(self, launcher_pid: int) -> None:
        self.launcher_pid = launcher_pid

    def pids(self) -> dict[str, int]:
        """Return process ids by role, without missing ones."""
        found = {LAUNCHER: self.launcher_pid} if command_line(self.launcher_pid) else {}
        server_pid = self._server_pid()
        if server_pid is None:
            return found
        for pid in session_pids(server_pid):
            arguments = command_line(pid)
            if pid == server_pid:
                found[SERVER] = pid
            elif any(argument.startswith(PARENT_OPTION) for argument in arguments):
                found[ENGINE] = pid
        return found

    def engine_pid(self) -> int | None:
        return self.pids().get(ENGINE)

    def sample(self, num_tokens: int = 0) -> Sample:
        processes = {role: found for role, pid in self.pids().items() if (found := process_sample(pid)) is not None}
        return Sample(time.monotonic(), processes, num_tokens)

    def _server_pid(self) -> int | None:
        """Return the pid of tritonserver, the launcher's only child."""
        try:
            children = Path(f"/proc/{self.launcher_pid}/task/{self.launcher_pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None


class Watch:
    """A thread that takes samples between start and stop."""

    def __init__(self, processes: ServiceProcesses, period_s: float, num_tokens: Callable[[], int]) -> None:
        self.samples: list[Sample] = []
        self._processes = processes
        self._period_s = period_s
        self._num_tokens = num_tokens
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.samples.append(self._processes.sample(self._num_tokens()))


def process_sample(pid: int) -> ProcessSample | None:
    try:
        _, rss_pages, shared_pages, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        num_fds, num_threads = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
    except (OSError, ValueError):  # it has just ended
        return None
    anon_bytes = (rss_pages - shared_pages) * _PAGE_BYTES
    return ProcessSample(pid, rss_pages * _PAGE_BYTES, anon_bytes, num_fds, num_threads)
