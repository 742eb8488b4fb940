"""Directories of launches. A launch locks its own, so directories of dead launches can be recognized and removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

from faser_trtllm.errors import UnavailableError

RUN_DIR_VARIABLE = "FASER_RUN_DIR"  # directory of the launch, if `faser serve` started the server
STARTUP_ERROR_FILE = "startup_error"  # file in that directory: why a model could not be opened
_NAME = re.compile(r"faser_[0-9a-f]{12}_run")


class RunDir:
    """A directory of mode 0700 that this process owns while it holds the lock on it.

    The kernel releases the lock when the process ends; other containers that share the file system see it too.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def open(cls) -> RunDir:
        """Create a directory among the temporary files; raise UnavailableError."""
        while True:
            path = Path(tempfile.gettempdir(), f"faser_{secrets.token_hex(6)}_run")
            try:
                path.mkdir(mode=0o700)
            except OSError as error:
                raise UnavailableError(
                    f"{path.parent} is not writable: {error.strerror}; free space or permit it, or set TMPDIR"
                ) from None
            fd = _lock(path)
            if fd is not None:  # otherwise another launch took it for stale
                return cls(path, fd)

    def close(self) -> None:
        """Remove the directory."""
        if self._lock_fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = -1


def remove_stale() -> list[Path]:
    """Remove the directories of dead launches, and return them."""
    removed = []
    for path in Path(tempfile.gettempdir()).iterdir():
        fd = _lock(path) if _NAME.fullmatch(path.name) else None
        if fd is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)
            removed.append(path)
    return removed


def _lock(path: Path) -> int | None:
    """Lock a directory and return the descriptor that holds the lock; None if it is locked, not ours, or gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.stat(path)
        if status.st_uid == os.getuid() and status.st_ino == os.fstat(fd).st_ino:
            return fd
    os.close(fd)
    return None
