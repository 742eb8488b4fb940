"""Names of Triton's shared memory regions: one prefix per launch, so that leftovers of a crash can be found."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path

from faser_trtllm.errors import UnavailableError

SHM_DIR = Path("/dev/shm")
_LOCK_NAME = re.compile(r"faser_[0-9a-f]{12}_lock")


class ShmPrefix:
    """A prefix that this process owns while it holds the lock on `<prefix>lock`.

    The kernel releases the lock when the process ends; other containers that share /dev/shm see it too.
    """

    def __init__(self, prefix: str, lock_fd: int) -> None:
        self.prefix = prefix
        self._lock_fd = lock_fd

    @classmethod
    def open(cls) -> ShmPrefix:
        """Take a new prefix; raises UnavailableError."""
        prefix = f"faser_{secrets.token_hex(6)}_"
        try:
            fd = os.open(SHM_DIR / f"{prefix}lock", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(f"{SHM_DIR} is not writable: {error.strerror}; free space or permit it") from None
        fcntl.flock(fd, fcntl.LOCK_EX)
        return cls(prefix, fd)

    def regions(self) -> list[str]:
        """Names of the existing regions, including the lock."""
        return sorted(path.name for path in SHM_DIR.glob(f"{self.prefix}*"))

    def close(self) -> None:
        """Remove all regions of the prefix; nothing may use them after that."""
        if self._lock_fd >= 0:
            _remove(self.prefix)
            os.close(self._lock_fd)
            self._lock_fd = -1


def remove_stale() -> list[str]:
    """Remove the regions of launches that have died, and return their prefixes."""
    prefixes = []
    for lock in SHM_DIR.iterdir():
        if not _LOCK_NAME.fullmatch(lock.name):
            continue
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            prefix = lock.name.removesuffix("lock")
            _remove(prefix)
            prefixes.append(prefix)
        except OSError:
            continue
        finally:
            os.close(fd)
    return prefixes


def _remove(prefix: str) -> None:
    for path in SHM_DIR.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            path.unlink()
