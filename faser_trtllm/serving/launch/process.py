"""Functions for Linux processes: exit with the parent, and find and signal the processes of a session."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

PARENT_OPTION = "--parent_pid="  # an engine process is recognized by this option
REPLACE_DRAFT = signal.SIGUSR1  # has an engine process replace its draft with the one in its engine directory
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the thread that started it ends; exit if the parent has ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)


def session_pids(session_id: int) -> list[int]:
    """Return the process ids of a session, without zombies."""
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = _stat_fields(int(entry))
            if fields and fields[0] not in ("Z", "X") and int(fields[3]) == session_id:
                pids.append(int(entry))
    return pids


def command_line(pid: int) -> list[str]:
    """Return the arguments that a process was started with; empty if it no longer runs."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def kill(pid: int, signum: int) -> None:
    """Signal a process, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, ppid, pgrp, session, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
