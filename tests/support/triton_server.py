"""A real Triton server for tests, started as `faser serve` starts it, in a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from faser_trtllm.serving.launch.process import PARENT_OPTION, command_line, session_pids
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

_SERVE = """
import sys
from pathlib import Path
from faser_trtllm.errors import FaserError
from faser_trtllm.serving.launch.launcher import serve
from faser_trtllm.serving.launch.options import ServeOptions
try:
    sys.exit(serve(ServeOptions(
        engine_dir=Path({engine_dir!r}), http_port={ports[0]}, grpc_port={ports[1]}, metrics_port={ports[2]},
        config={config!r} and Path({config!r}), model_repo={model_repo!r} and Path({model_repo!r}),
        speculation={speculation!r}, num_branches={num_branches!r},
        models={models!r}, allow_control={allow_control!r}, decoupled={decoupled!r},
    )))
except FaserError as error:
    print("error:", error)
    sys.exit(2)
"""

REPOSITORY = ROOT / "triton_model_repo"
FAKE_ENGINE = {"FASER_ENGINE_MODULE": "tests.support.fake_engine"}
"""Environment of a server whose engine process has no engines; its launch names REPOSITORY, so that it needs none."""


# Linux gives clients ports from 32768 on: below, no connection takes one between its choice and its use. Each of
# pytest's workers has every 32nd, so that no two choose the same.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_OWN_PORTS = range(10_000 + _WORKER % 32, 32_000, 32)
_FIRST = random.SystemRandom().randrange(len(_OWN_PORTS))
_PORTS = itertools.cycle((*_OWN_PORTS[_FIRST:], *_OWN_PORTS[:_FIRST]))


def free_ports(count: int = 3) -> list[int]:
    """Ports that nobody listens on, never the same twice in a run of the tests."""
    return list(itertools.islice(filter(is_free, _PORTS), count))


class Server:
    """A running server; leaving the context ends it, by force if need be."""

    def __init__(
        self,
        engine_dir: Path,
        *,
        config: Path | None = None,
        speculation: str | None = None,
        num_branches: int | None = None,
        models: tuple[str, ...] | None = ("faser",),
        ports: list[int] | None = None,
        allow_control: bool = False,
        decoupled: bool = True,
        is_fake: bool = False,
        environment: dict[str, str] | None = None,
        command: Sequence[str] | None = None,
        log: Path,
    ) -> None:
        """is_fake: see FAKE_ENGINE. command: that serves engine_dir, without ports, in place of the options before."""
        self.ports = ports or free_ports()
        model_repo = REPOSITORY if is_fake else None
        self.http_url = f"http://127.0.0.1:{self.ports[0]}"
        self.grpc_url = f"127.0.0.1:{self.ports[1]}"
        self.log = log
        script = _SERVE.format(
            engine_dir=str(engine_dir),
            ports=self.ports,
            config=config and str(config),
            model_repo=model_repo and str(model_repo),
            speculation=speculation,
            num_branches=num_branches,
            models=models,
            allow_control=allow_control,
            decoupled=decoupled,
        )
        run: list[str] = [sys.executable, "-c", script]
        if command is not None:
            names = ("--http_port", "--grpc_port", "--metrics_port")
            options = [word for name, port in zip(names, self.ports, strict=True) for word in (name, str(port))]
            run = [*command, "--engine_dir", str(engine_dir), *options]
        env = os.environ | {"PYTHONFAULTHANDLER": "1"} | (FAKE_ENGINE if is_fake else {}) | (environment or {})
        with log.open("wb") as file:
            self.process = subprocess.Popen(run, stdout=file, stderr=file, cwd=ROOT, env=env)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def wait(self) -> int:
        """Return the launcher's exit status; tell where it is if it does not exit."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            sessions = map(session_pids, children(self.process.pid))
            running = [command_line(pid) for pid in itertools.chain.from_iterable(sessions)]
            self.process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
            self.process.wait()
            raise AssertionError(f"{running}\n{self.output()}") from None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self, timeout_s: float = 90) -> Server:
        deadline_s = time.monotonic() + timeout_s
        while "ready:" not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline_s, self.output()
            time.sleep(0.05)
        return self

    def metric(self, name: str) -> float:
        """A metric by the beginning of its line; 0 if it is not there yet."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[2]}/metrics", timeout=30) as answer:
            found = re.search(rf"^{re.escape(name)}.* ([0-9.e+-]+)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def triton_pid(self) -> int:
        """tritonserver is the launcher's only child."""
        pids = children(self.process.pid)
        assert len(pids) == 1
        return pids[0]

    def run_dir(self) -> Path:
        """Files of this launch."""
        found = run_dir(self.process.pid)
        assert found is not None
        return found

    def pids(self) -> list[int]:
        """tritonserver and the engine process."""
        return session_pids(self.triton_pid())

    def engine_pid(self) -> int:
        return self.pid_of(PARENT_OPTION)

    def pid_of(self, part: str) -> int:
        return next(pid for pid in self.pids() if any(part in argument for argument in command_line(pid)))


def children(pid: int) -> list[int]:
    """Return the child processes of all threads of `pid`."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found


def run_dir(launcher_pid: int) -> Path | None:
    """The directory of a launch; None while it has no tritonserver."""
    option = "--backend-directory="
    for pid in children(launcher_pid):
        for argument in command_line(pid) or ():
            if argument.startswith(option):
                return Path(argument.removeprefix(option)).parent
    return None


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
