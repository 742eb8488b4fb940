"""The server under attack, `faser serve` in this process with its engine process."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.ports import free_ports
from benchmarks.soak.watch import process_sample
from faser_trtllm.serving.launch.launcher import Launcher
from faser_trtllm.serving.launch.options import ServeOptions
from faser_trtllm.serving.launch.process import PARENT_OPTION, command_line, session_pids

NUM_KV_TOKENS = 96 << 10
"""Enough for the largest case: 64 sequences of a thousand tokens, and the cached blocks of its plain case."""


class Service:
    """The server under attack, a context manager; raises FaserError if the server does not start."""

    def __init__(self, engine_dir: Path, log_file: Path, **settings: Any) -> None:
        """Configure the server; settings are keys of faser.yaml."""
        self.http_port, self.grpc_port, metrics_port = free_ports(3)
        self._launcher = Launcher(
            ServeOptions(
                engine_dir=engine_dir,
                http_port=self.http_port,
                grpc_port=self.grpc_port,
                metrics_port=metrics_port,
                settings={"kv_cache_config": {"max_tokens": NUM_KV_TOKENS}, **settings},
                log_file=log_file,
            )
        )

    def __enter__(self) -> Service:
        self._launcher.__enter__()
        try:
            self._launcher.start()
            self._launcher.wait_ready()
        except BaseException:
            self._launcher.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._launcher.stop()
        finally:
            self._launcher.__exit__(kind, error, trace)

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def engine_pid(self) -> int | None:
        """Return the pid of the engine process, or None while there is none."""
        assert self._launcher.pid is not None
        pids = session_pids(self._launcher.pid)
        found = (pid for pid in pids if any(PARENT_OPTION in argument for argument in command_line(pid) or ()))
        return next(found, None)

    def engine_rss_bytes(self) -> int:
        pid = self.engine_pid()
        sample = None if pid is None else process_sample(pid)
        return 0 if sample is None else sample.rss_bytes
