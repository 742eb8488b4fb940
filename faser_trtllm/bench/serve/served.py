"""A service that the bench starts over an engine directory, and its CPU time."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from faser_trtllm.serving.launch.launcher import Launcher
from faser_trtllm.serving.launch.options import ServeOptions
from faser_trtllm.serving.launch.process import session_pids


class Served:
    """Use as a context manager; raises FaserError if the service does not start."""

    def __init__(
        self, engine_dir: Path, speculation: str | None, log_file: Path, stream_interval: int | str = "auto"
    ) -> None:
        http_port, grpc_port, metrics_port = free_ports(3)
        self.url = f"127.0.0.1:{grpc_port}"
        self._stack = ExitStack()
        self._launcher = Launcher(
            ServeOptions(
                engine_dir=engine_dir,
                http_port=http_port,
                grpc_port=grpc_port,
                metrics_port=metrics_port,
                speculation=speculation,
                settings={"stream_interval": stream_interval},
                log_file=log_file,
            )
        )

    def __enter__(self) -> Served:
        with ExitStack() as guard:
            launcher = guard.enter_context(self._launcher)
            launcher.start()
            launcher.wait_ready()
            self._stack = guard.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            self._launcher.stop()

    def cpu_s(self) -> float:
        """CPU time of all its processes so far, in seconds."""
        assert self._launcher.pid is not None
        return sum(map(_cpu_s, session_pids(self._launcher.pid)))


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
