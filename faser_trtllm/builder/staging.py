"""Create a directory atomically: write it next to the final path, then rename it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """Yield an empty sibling directory that replaces `final` at the end of the block, or is removed on an error. It is
    locked, so that remove_leftovers() of any container knows that its process lives.

    Syncs everything to disk before it renames. Replacing `final` takes two renames: a kill in between leaves no
    `final`, but never a mixture. remove_leftovers() removes what killed processes leave. Raises OSError.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    name = f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}"
    staging = final.parent / f"{name}.building"
    staging.mkdir()
    lock = os.open(staging, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # NFS locks no directories
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield staging
        for directory, _, files in os.walk(staging):
            for file in files:
                _sync(Path(directory) / file)
            _sync(Path(directory))
        replaced = final.parent / f"{name}.replaced"
        try:
            if os.path.lexists(final):
                final.rename(replaced)
            staging.rename(final)
        except BaseException:
            if os.path.lexists(replaced) and not os.path.lexists(final):
                replaced.rename(final)
            raise
        _sync(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        _remove(staging)
        raise
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    """Remove a directory, even if Ctrl-C is pressed meanwhile."""
    while path.exists():
        with contextlib.suppress(KeyboardInterrupt):
            shutil.rmtree(path, ignore_errors=True)
            return


def remove_leftovers(final: Path) -> None:
    """Remove the directories that killed processes left next to `final` in staged_directory()."""
    pattern = re.compile(re.escape(f".{final.name}.") + r"\d+\.[0-9a-f]{8}\.(building|replaced)")
    with contextlib.suppress(OSError):  # the folder is missing, or not ours
        for path in list(final.parent.iterdir()):
            match = pattern.fullmatch(path.name)
            # A replaced directory without a new one may come back.
            if match and (os.path.lexists(final) if match[1] == "replaced" else not _is_locked(path)):
                shutil.rmtree(path, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    """Return True if a process has locked the directory, or if that cannot be known."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
