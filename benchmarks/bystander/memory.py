"""Memory of waiting requests, and of the engine process after all requests have ended."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.bystander.cases import BASE, Case
from benchmarks.bystander.service import Service
from benchmarks.soak.growth import MIB

BYTES_PER_BODY_BYTE = 16
SLACK_BYTES = 4 << 20
NUM_WAITING = 8
_STEADY_S = 0.6
_MAX_S = 5.0
_FILLER = Case("filler", {**BASE, "max_tokens": 1 << 20, "num_return_sequences": 64}).body()


@dataclass(frozen=True)
class Held:
    """Memory of a case. bytes_each: growth of the engine process per waiting request. is_waiting: False if refused."""

    case: Case
    num_body_bytes: int
    bytes_each: float
    is_waiting: bool

    @property
    def limit(self) -> float:
        return BYTES_PER_BODY_BYTE * self.num_body_bytes + SLACK_BYTES

    @property
    def is_kept(self) -> bool:
        return self.bytes_each <= self.limit

    def __str__(self) -> str:
        return f"{self.bytes_each / MIB:.1f} MiB each, a body of {self.num_body_bytes} bytes"


def measure_held(case: Case, service: Service) -> Held:
    """Measure the growth of a fresh engine process by NUM_WAITING requests over HTTP while its one slot is taken."""
    body = Case(case.name, {**case.fields, "stream": True}).body()
    _restart(service)
    with contextlib.ExitStack() as stack:
        _open(stack, service, _FILLER).readline()
        time.sleep(0.2)
        before = service.engine_rss_bytes()
        with contextlib.ExitStack() as waiting:
            connections = [waiting.enter_context(_connection(service, body)) for _ in range(NUM_WAITING)]
            after = max(_until_steady(service))
            is_waiting = not any(_has_answered(connection) for connection in connections)
    return Held(case, len(body), (after - before) / NUM_WAITING, is_waiting)


def _restart(service: Service) -> None:
    """Start a new engine process, so that memory freed before does not hide new allocations."""
    pid = service.engine_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        time.sleep(0.1)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.ExitStack() as stack:
            if service.engine_pid() not in (None, pid):
                answer = _open(stack, service, Case("probe", {**BASE, "max_tokens": 1}).body())
                if answer.status == 200 and b"error" not in answer.readline():
                    return
    raise TimeoutError("the engine process did not start again")


def _open(stack: contextlib.ExitStack, service: Service, body: bytes) -> http.client.HTTPResponse:
    return stack.enter_context(_connection(service, body)).getresponse()


@contextlib.contextmanager
def _connection(service: Service, body: bytes) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", service.http_port, timeout=60)
    try:
        connection.request("POST", "/v2/models/faser/generate_stream", body)
        yield connection
    finally:
        connection.close()


def _until_steady(service: Service) -> list[int]:
    seen, begun_s, steady_s = [service.engine_rss_bytes()], time.monotonic(), time.monotonic()
    while time.monotonic() - steady_s < _STEADY_S and time.monotonic() - begun_s < _MAX_S:
        time.sleep(0.1)
        seen.append(service.engine_rss_bytes())
        if seen[-1] > max(seen[:-1]) + (64 << 10):
            steady_s = time.monotonic()
    return seen


def _has_answered(connection: http.client.HTTPConnection) -> bool:
    import select

    return bool(select.select([connection.sock], [], [], 0)[0])
