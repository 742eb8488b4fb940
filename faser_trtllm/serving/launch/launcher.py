"""`faser serve`: starts Triton with our model repository, keeps it running, drains it, and cleans up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from faser_trtllm.config import ServiceConfig
from faser_trtllm.errors import FaserError, UnavailableError
from faser_trtllm.executor.factory import SYNTHETIC_WARNING
from faser_trtllm.serving.client import CLIENT_HEADER
from faser_trtllm.serving.launch.control import KEY_FILE_VARIABLE, KEY_VARIABLE, control_key, restriction
from faser_trtllm.serving.launch.faults import fault_wrapper
from faser_trtllm.serving.launch.hang import LEAST_S, HangWatch, status_of
from faser_trtllm.serving.launch.hashes import FileHashes, StoppedError
from faser_trtllm.serving.launch.limits import check_limits
from faser_trtllm.serving.launch.options import ServeOptions, check_engines, default_repository, effective_config
from faser_trtllm.serving.launch.ports import check_ports, is_free
from faser_trtllm.serving.launch.process import PARENT_OPTION, REPLACE_DRAFT, command_line, kill, session_pids
from faser_trtllm.serving.launch.repository import choose_models, link_unary
from faser_trtllm.serving.launch.run_dir import RUN_DIR_VARIABLE, STARTUP_ERROR_FILE, RunDir, remove_stale
from faser_trtllm.serving.launch.signals import stop_on_signals
from faser_trtllm.serving.launch.tritonserver import check_exposure, find_tritonserver, link_backends, pass_on, spawn

EXIT_TIMEOUT_S = 5
MMAP_THRESHOLD_BYTES = 1 << 20
"""Buffers of at least this size return to the system when they are freed. By default, glibc raises the threshold to
32 MiB after the first large request, and later ones fragment the heap: 303 MiB instead of 125 after 240 worst requests.
"""
STEADY_S = 10.0  # a server that ran this long resets the back-off


class Launcher:
    """One launch of a server. A context manager: leaving it ends everything that was started."""

    def __init__(self, options: ServeOptions, hashes: FileHashes | None = None, is_restart: bool = False) -> None:
        """Check options and engines; raise FaserError. hashes: those of earlier launches, to read files only once."""
        self._options = options
        self._repository = (options.model_repo or default_repository()).absolute()
        self.models = choose_models(self._repository, options.models)
        self._config, self.conversion = effective_config(options, self._repository)
        self._binary = find_tritonserver(options.tritonserver)
        if not options.allow_vulnerable_triton:
            check_exposure(options.host, self._binary)
        self._hash_mismatches: tuple[str, ...] = ()
        if options.model_repo is None:  # a custom repository may serve something else
            self._hash_mismatches = check_engines(
                self._config, options.allow_hash_mismatch, hashes or FileHashes(), is_restart
            )
        fault_wrapper()  # raises for a wrong FASER_FAULT before a server is started
        self._control_key = None if options.allow_control else control_key()
        self._process: subprocess.Popen[bytes] | None = None
        self._run_dir: RunDir | None = None
        self._log: IO[bytes] | None = None
        self._messages: threading.Thread | None = None  # passes on the server's messages if there is no log file
        self._end_signal: str | None = None
        self.hurry = threading.Event()  # set: stop waiting for running requests

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @property
    def is_synthetic(self) -> bool:
        """True if synthetic_acceptance is on, so that outputs are not the target's."""
        return self._config.synthetic_acceptance is not None

    @property
    def config(self) -> ServiceConfig:
        """The effective configuration."""
        return self._config

    @property
    def end_signal(self) -> str | None:
        """The signal that ended the server, such as "SIGSEGV"; None if it runs or has exited."""
        return self._end_signal

    @property
    def pid(self) -> int | None:
        """Process id of tritonserver, which is also its session id."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the server; raise FaserError if it cannot work, such as for a port in use."""
        check_ports(self._options.host, self._options.ports)
        for mismatch in self._hash_mismatches:
            print(f"WARNING: {mismatch}; served anyway (--allow_hash_mismatch)", file=sys.stderr, flush=True)
        remove_stale()
        check_limits()
        self._run_dir = RunDir.open()
        if self._options.log_file is not None:
            self._log = self._options.log_file.open("ab")
        run_dir = self._run_dir.path
        self._process = spawn(self._command(run_dir), self._environment(run_dir), self._log)
        if self._process.stdout is not None:
            self._messages = threading.Thread(target=pass_on, args=(self._process.stdout,), daemon=True)
            self._messages.start()

    def wait_ready(self, stop: threading.Event | None = None) -> bool:
        """Wait until requests are served; return False if `stop` was set first. Raise FaserError if the start fails."""
        deadline_s = time.monotonic() + self._config.startup_timeout_s + 30
        waiting = list(self.models)
        while stop is None or not stop.is_set():
            if not self.is_running():
                raise self._start_error()
            while waiting and self._get(f"/v2/models/{waiting[0]}/ready") == 200:
                waiting.pop(0)
            if not waiting:
                return True
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"the server was not ready within startup_timeout_s {self._config.startup_timeout_s:g}; raise it"
                )
            time.sleep(0.05)
        return False

    def is_running(self) -> bool:
        if self._process is None:
            return False
        code = self._process.poll()
        if code is not None and code < 0 and self._end_signal is None:
            self._end_signal = signal.Signals(-code).name
        return code is None

    def stop(self) -> None:
        """Drain and stop the server: running requests get drain_timeout_s and then fail as UNAVAILABLE.

        The engine drains before Triton is told to stop, because Triton closes its HTTP port at once and crashes if a
        stream outlives its exit timeout.
        """
        if self.is_running():
            assert self._process is not None
            engines = self._engine_pids()
            for pid in engines:
                kill(pid, signal.SIGTERM)
            self._wait(lambda: not any(command_line(pid) for pid in engines), self._config.drain_timeout_s + 3)
            time.sleep(0.1)
            kill(self._process.pid, signal.SIGTERM)
            self._wait(lambda: not self.is_running(), EXIT_TIMEOUT_S + 5)
        self.kill()

    def replace_draft(self) -> None:
        """Have the engine process replace its draft with the one that is now in the engine directory."""
        for pid in self._engine_pids():
            kill(pid, REPLACE_DRAFT)

    def kill(self) -> None:
        """Kill all processes of the launch and remove its files."""
        process = self._process
        if process is not None:
            deadline_s = time.monotonic() + 5
            while True:
                pids = session_pids(process.pid)
                for pid in pids:
                    kill(pid, signal.SIGKILL)
                process.poll()
                if not pids or time.monotonic() > deadline_s:
                    break
                time.sleep(0.01)
            process.wait()
        if self._messages is not None:
            self._messages.join(1.0)
        if self._run_dir is not None:
            self._run_dir.close()
        if self._log is not None:
            self._log.close()

    def leftovers(self) -> list[str]:
        """Describe the processes, files and ports that the launch still uses; empty after stop() or kill()."""
        left = [f"process {pid}" for pid in session_pids(self._process.pid)] if self._process is not None else []
        if self._run_dir is not None and self._run_dir.path.exists():
            left.append(f"directory {self._run_dir.path}")
        return left + [f"port {port}" for port in self._options.ports.values() if not is_free(self._options.host, port)]

    def _command(self, run_dir: Path) -> list[str]:
        options = self._options
        repository = self._repository if options.decoupled else link_unary(self._repository, run_dir / "unary")
        command = [
            str(self._binary),
            f"--model-repository={repository}",
            f"--backend-directory={link_backends(self._binary, run_dir / 'backends')}",
            "--model-control-mode=explicit",
            "--disable-auto-complete-config",
            *(f"--load-model={name}" for name in self.models),
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            f"--http-address={options.host}",
            f"--http-port={options.http_port}",
            f"--grpc-address={options.host}",
            f"--grpc-port={options.grpc_port}",
            f"--metrics-address={options.host}",
            f"--metrics-port={options.metrics_port}",
            f"--http-header-forward-pattern={CLIENT_HEADER}",
            f"--grpc-header-forward-pattern={CLIENT_HEADER}",
            "--allow-gpu-metrics=false",
            f"--log-info={str(options.verbose).lower()}",
            f"--log-warning={str(options.verbose).lower()}",
        ]
        if self._control_key is not None:
            command += restriction(self._control_key)
        return command

    def _environment(self, run_dir: Path) -> dict[str, str]:
        config = run_dir / "faser.yaml"  # JSON is YAML
        config.write_text(self._config.model_dump_json())
        environment = {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES)} | os.environ
        environment["FASER_PYTHON"] = sys.executable  # build.sh knows the variable as well
        for name in ("FASER_ENGINE_DIR", "FASER_API_KEY", KEY_VARIABLE, KEY_FILE_VARIABLE):
            environment.pop(name, None)
        environment |= {"FASER_CONFIG": str(config), RUN_DIR_VARIABLE: str(run_dir)}
        package_parent = str(Path(__file__).resolve().parents[3])
        paths = [package_parent, *environment.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return environment

    def _engine_pids(self) -> list[int]:
        return self._find(lambda arguments: any(map(_is_engine_option, arguments)))

    def _find(self, is_wanted: Callable[[list[str]], bool]) -> list[int]:
        """Find processes of the launch by their arguments."""
        assert self._process is not None
        pids = ((pid, command_line(pid)) for pid in session_pids(self._process.pid))
        return [pid for pid, arguments in pids if arguments and is_wanted(arguments)]

    def _get(self, path: str) -> int | None:
        return status_of(self._options.host, self._options.http_port, path, timeout_s=2)

    def _wait(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.hurry.is_set() and time.monotonic() < deadline_s and not is_over():
            time.sleep(0.02)

    def _start_error(self) -> FaserError:
        assert self._run_dir is not None
        with contextlib.suppress(OSError):
            reason = (self._run_dir.path / STARTUP_ERROR_FILE).read_text()
            return UnavailableError(f"the server did not start: {reason}")
        where = f"see {self._options.log_file}" if self._options.log_file else "see its messages above"
        assert self._process is not None
        return UnavailableError(f"the server did not start (status {self._process.returncode}); {where}")


def _is_engine_option(argument: str) -> bool:
    return argument.startswith(PARENT_OPTION)


def serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT; a second signal stops the server at once. SIGUSR1 replaces the draft."""
    stop, hurry, draft_changed = (threading.Event() for _ in range(3))
    with stop_on_signals(stop, hurry, draft_changed):
        return keep_serving(options, stop, hurry, _say_ready, draft_changed)


def keep_serving(
    options: ServeOptions,
    stop: threading.Event,
    hurry: threading.Event,
    on_ready: Callable[[Launcher, ServeOptions], None],
    draft_changed: threading.Event,
) -> int:
    """Run a server until `stop` is set. Return 0 after a drain, 1 if the server ended by itself.

    A server that a signal ended is started again, repeatedly if it cannot start then, since a port may be taken for a
    moment. A server that does not answer for hang_timeout_s, at least LEAST_S, is killed and started again. Raises
    FaserError if the first start fails.

    hurry: if set, do not wait for running requests. draft_changed: if set, load the draft from the engine directory
    again.
    """
    backoff_s, config, hashes = 0.0, None, FileHashes(stop)
    while True:
        started_s = time.monotonic()
        try:
            with Launcher(options, hashes, is_restart=config is not None) as launcher:
                launcher.hurry = hurry
                if _serve_once(launcher, options, stop, on_ready, draft_changed):
                    return 0
            config = launcher.config
            if launcher.end_signal is None:
                print("the server ended by itself; see its messages", file=sys.stderr, flush=True)
                return 1
            what = f"the server was ended by {launcher.end_signal} and is started again"
        except StoppedError:
            return 0
        except (FaserError, OSError) as error:  # a full disk or too many processes, which may pass
            if config is None:
                raise
            what = f"the server could not be started again and is tried once more: {error}"
        lived_s = time.monotonic() - started_s
        backoff_s = config.restart_backoff_s if lived_s > STEADY_S else 2 * backoff_s or config.restart_backoff_s
        backoff_s = min(backoff_s, config.restart_backoff_max_s)
        print(what, file=sys.stderr, flush=True)
        if stop.wait(backoff_s):
            return 0


def _serve_once(
    launcher: Launcher,
    options: ServeOptions,
    stop: threading.Event,
    on_ready: Callable[[Launcher, ServeOptions], None],
    draft_changed: threading.Event,
) -> bool:
    """Serve until `stop` is set, then drain; return False if the server ended first."""
    if launcher.conversion is not None:
        print(f"{options.config} is a TensorRT-LLM configuration:", file=sys.stderr)
        print(launcher.conversion.as_text(), file=sys.stderr, flush=True)
    launcher.start()
    if launcher.wait_ready(stop):
        if launcher.is_synthetic:
            print(SYNTHETIC_WARNING, file=sys.stderr, flush=True)
        on_ready(launcher, options)
    watch, limit_s = HangWatch(options.host, options.http_port), max(launcher.config.hang_timeout_s, LEAST_S)
    while not stop.wait(0.2):
        if not launcher.is_running():
            return False
        if draft_changed.is_set():
            draft_changed.clear()
            launcher.replace_draft()
        silent_s = watch.silent_s()
        if silent_s >= limit_s:
            print(f"the server has not answered for {silent_s:.0f} s and is killed", file=sys.stderr, flush=True)
            launcher.kill()
    launcher.stop()
    return True


def _say_ready(launcher: Launcher, options: ServeOptions) -> None:
    print(
        f"ready: {', '.join(launcher.models)} on http://{options.host}:{options.http_port} "
        f"(gRPC {options.grpc_port}, metrics {options.metrics_port})",
        flush=True,
    )
