"""One engine child shared by all models of a server, although Triton runs each model in its own process.

The first model to take the lock starts the child and supervises it; the others connect to the child's socket. When that
model is unloaded, its child ends with it, and the next model to take the lock starts a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from faser_trtllm.config import ServiceConfig
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.worker.messages import Connection, ConnectionClosedError, Stop
from faser_trtllm.serving.worker.supervisor import ENGINE_COMMAND, Supervisor

RUN_DIR_VARIABLE = "FASER_RUN_DIR"
_RETRY_S = 0.05
_MAX_SOCKET_PATH_BYTES = 107  # Linux: sizeof(sockaddr_un.sun_path) - 1


class SharedEngine(Supervisor):
    """A Supervisor whose child is shared with other processes that have the same configuration."""

    def __init__(
        self,
        config: ServiceConfig,
        command: Sequence[str] = ENGINE_COMMAND,
        on_stats: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        """on_stats: as in Supervisor, but only while this process runs the child, then {} once: sums over models count
        each engine once."""
        directory = open_run_dir()
        name = f"engine_{hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]}"
        self._socket_path = directory / f"{name}.sock"
        if len(os.fsencode(self._socket_path)) > _MAX_SOCKET_PATH_BYTES:
            raise InvalidArgumentError(
                f"{RUN_DIR_VARIABLE} is a path of {len(os.fsencode(directory))} bytes, allowed are at most "
                f"{_MAX_SOCKET_PATH_BYTES - len(name) - 6}; choose a shorter one"
            )
        self._lock = _FileLock(directory / f"{name}.lock")
        super().__init__(config, (*command, f"--listen={self._socket_path}"))
        self._own_on_stats = on_stats
        self._num_own_restarts = 0

    @property
    def runs_engine(self) -> bool:
        """Whether this process supervises the engine child."""
        return self._lock.is_held

    def stats(self) -> dict[str, float]:
        """As Supervisor.stats(); num_restarts counts only the children that this process started."""
        return super().stats() | {"num_restarts": self._num_own_restarts}

    def stop(self, request_id: int) -> None:
        """Ask the child to end a request with the output it has so far; unknown ids are ignored."""
        with self._changed:
            connection = self._connection if request_id in self._events else None
        if connection is not None:
            with contextlib.suppress(ConnectionClosedError):
                connection.send(Stop(request_id))

    def close(self) -> None:
        """As Supervisor.close(); if this process ran the child, another model takes over."""
        if self._lock.is_held:  # no other model may join a child that is about to end
            self._socket_path.unlink(missing_ok=True)
        super().close()
        if RUN_DIR_VARIABLE not in os.environ:
            with contextlib.suppress(OSError):  # another model still uses it
                self._socket_path.parent.rmdir()

    def _serve_child(self) -> None:
        while not self._closing.is_set():
            if self._lock.acquire():
                self._on_stats = self._own_on_stats
                if self._ready is not None:  # not the first child, whichever process started that one
                    self._num_own_restarts += 1
                super()._serve_child()
                return
            connection = self._connect()
            if connection is not None:
                self._on_stats = None
                with self._changed:
                    self._connection = connection
                with contextlib.suppress(ConnectionClosedError):
                    self._read(connection)
                if self._ready is not None:
                    return
                with self._changed:  # the child was shutting down; retry
                    self._connection = None
                connection.close()
            self._closing.wait(_RETRY_S)

    def _end_child(self) -> None:
        super()._end_child()
        if self._lock.is_held:
            self._socket_path.unlink(missing_ok=True)
            if self._own_on_stats is not None:
                self._own_on_stats({})
            self._lock.release()

    def _connect(self) -> Connection | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self._socket_path))
        except OSError:
            sock.close()
            return None
        return Connection(sock)


class _FileLock:
    """An inter-process lock that the kernel releases when its holder dies. The file exists while the lock is held."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    @property
    def is_held(self) -> bool:
        return self._file is not None

    def acquire(self) -> bool:
        """Take the lock without waiting; False if another process holds it."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_ino == os.stat(self._path).st_ino:  # otherwise the previous holder removed the file
                self._file = file
                return True
        except OSError:
            pass
        os.close(file)
        return False

    def release(self) -> None:
        assert self._file is not None
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = None


def open_run_dir() -> Path:
    """The directory shared by the models of this server: FASER_RUN_DIR, or one named after the server's process id."""
    named = os.environ.get(RUN_DIR_VARIABLE)
    path = Path(named) if named else Path(tempfile.gettempdir(), f"faser_{os.getuid()}_{os.getppid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise InvalidArgumentError(
            f"{RUN_DIR_VARIABLE} is a directory that other users can access; it must belong to this user, with mode 700"
        )
    return path
