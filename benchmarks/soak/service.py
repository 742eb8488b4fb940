"""The service under test: a `faser serve` process started here, or one already running."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.ports import free_ports
from benchmarks.soak.options import SoakOptions
from benchmarks.soak.watch import ServiceProcesses
from faser_trtllm.errors import FaserError, UnavailableError
from faser_trtllm.serving.launch.process import command_line
from faser_trtllm.serving.observe.scrape import Scrape
from faser_trtllm.serving.observe.view import fetch

RESTARTS = "engine restarts"
_STOP_S = 60.0


class Service:
    """The service, a context manager. processes: None if they are not visible to us."""

    def __init__(self, options: SoakOptions, log_file: Path) -> None:
        self._options = options
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self.url = options.url or ""
        self.http_url = options.http_url or ""
        self._metrics_url = options.metrics_url or ""
        self.processes = None if options.launcher_pid is None else ServiceProcesses(options.launcher_pid)

    def __enter__(self) -> Service:
        if self._options.is_own_service:
            with contextlib.ExitStack() as guard:
                guard.callback(self._kill)
                self._start()
                guard.pop_all()
        else:
            fetch(self._metrics_url)
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill()

    def is_running(self) -> bool:
        """Return False if a service started here has ended."""
        return self._process is None or self._process.poll() is None

    def log_bytes(self) -> int:
        """Return the length of the log of a service started here, else 0."""
        return self._log_file.stat().st_size if self._process is not None else 0

    def metrics(self) -> Scrape:
        """Return the service's metrics; UnavailableError if it does not respond."""
        return fetch(self._metrics_url)

    def stop(self) -> list[str]:
        """Drain and stop a service started here; return a description of anything left over."""
        if self._process is None:
            return []
        assert self.processes is not None
        pids = self.processes.pids()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return [f"it did not end within {_STOP_S:g} s of SIGTERM"]
        left = [f"it ended with status {code}"] if code else []
        return left + [f"process {role}" for role, pid in pids.items() if command_line(pid)]

    def _start(self) -> None:
        http_port, grpc_port, metrics_port = free_ports(3)
        options = self._options
        command = [sys.executable, "-m", "faser_trtllm.cli", "serve", "--engine_dir", str(options.engine_dir)]
        for name, port in (("http_port", http_port), ("grpc_port", grpc_port), ("metrics_port", metrics_port)):
            command += [f"--{name}", str(port)]
        config = self._log_file.with_suffix(".yaml")
        config.write_text(f"kv_cache_config: {{max_tokens: {options.kv_cache_tokens}}}\n")
        command += ["--config", str(config)]
        if options.models is not None:
            command += ["--models", ",".join(options.models)]
        if options.speculation is not None:
            command += ["--speculation", options.speculation]
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.url, self.http_url = f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{http_port}"
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self.processes = ServiceProcesses(self._process.pid)
        while b"ready:" not in self._log_file.read_bytes():
            if self._process.poll() is not None:
                lines = self._log_file.read_text(errors="replace").strip().splitlines()
                raise FaserError(f"the service did not start: {lines[-1] if lines else 'it gave no reason'}")
            time.sleep(0.1)

    def _kill(self) -> None:
        """Kill the launcher, which stops its children."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def wait_idle(service: Service, timeout_s: float) -> dict[str, float]:
    """Wait until the service reports that it is idle and return its gauges, or the latest ones on a timeout.

    The engine publishes once a second: values from before the call do not count.
    """
    called_s, deadline_s = time.time(), time.monotonic() + timeout_s
    while True:
        gauges, answered_s = _gauges(service)
        is_over = time.monotonic() > deadline_s or not service.is_running()
        if (is_idle(gauges) and answered_s > called_s) or is_over:
            return gauges
        time.sleep(0.2)


def is_idle(gauges: dict[str, float]) -> bool:
    """Return True without requests and with all KV blocks free."""
    if not gauges or gauges["requests running"] or gauges["requests waiting"]:
        return False
    return gauges["KV blocks free"] == gauges["KV blocks"] > 0


def _gauges(service: Service) -> tuple[dict[str, float], float]:
    """Return gauges (empty if the service does not respond), and the engine's last report in Unix seconds."""
    try:
        scrape = service.metrics()
    except UnavailableError:
        return {}, 0.0
    blocks = scrape.by_label("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type")
    gauges = {
        "requests running": scrape.get("faser_num_requests_running"),
        "requests waiting": scrape.get("faser_num_requests_waiting"),
        "KV blocks free": blocks.get("free", 0.0),
        "KV blocks": blocks.get("max", 0.0),
        RESTARTS: scrape.get("faser_engine_restarts_total"),
    }
    by_model = scrape.by_label("nv_trt_llm_general_metrics", "model", general_type="timestamp")
    return gauges, max(by_model.values(), default=0.0)
