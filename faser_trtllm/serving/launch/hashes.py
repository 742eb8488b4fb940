"""Hashes of engine files, computed once and not at each restart of the server."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

from faser_trtllm.errors import FaserError

_PIECE_BYTES = 1 << 20


class StoppedError(FaserError):
    """The launch was told to stop before it had read all files."""


class FileHashes:
    """Computes sha256 of files. A file is read again only if its inode, size or times have changed."""

    def __init__(self, stop: threading.Event | None = None) -> None:
        """stop: once set, reading a file ends at once."""
        self._stop = stop or threading.Event()
        self._known: dict[Path, tuple[tuple[int, ...], str]] = {}

    def of(self, path: Path) -> str:
        """Return the sha256 of the file as hex. Raises OSError, and StoppedError once `stop` is set."""
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            known = self._known.get(path)
            if known is not None and known[0] == version:
                return known[1]
            digest = hashlib.sha256()
            while piece := file.read(_PIECE_BYTES):
                if self._stop.is_set():
                    raise StoppedError("stopped while the engine files were read")
                digest.update(piece)
        self._known[path] = version, digest.hexdigest()
        return digest.hexdigest()
