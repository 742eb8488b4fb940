"""Hostile clients: worst requests of the bystander family, unary clients that hang up, idle connections."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from random import Random
from urllib.parse import urlsplit

import grpc

from benchmarks.bystander.canary import STREAM
from benchmarks.bystander.cases import Case, all_cases
from benchmarks.soak.jobs import UNARY, WORST, Job, Plan
from benchmarks.soak.ledger import Answer, Ledger
from benchmarks.soak.load import CHANNEL_OPTIONS

HANG_UP_SHARE = 0.2  # share of unary hostile requests, whose client does not wait
_ENDLESS_S = 1.0  # the client of an endless stream hangs up after this
_ERROR_TAG = b"\x0a"  # field 1 of ModelStreamInferResponse
_NOT_TEXT = b'"error"'


class HostileClients:
    """Threads that keep hostile requests at a share of all, until stop is set."""

    def __init__(
        self,
        url: str,
        http_url: str,
        ledger: Ledger,
        jobs: Sequence[Job],
        share: float,
        seed: int,
        timeout_s: float,
    ) -> None:
        self._address = (urlsplit(http_url).hostname or "", urlsplit(http_url).port or 80)
        self._channel_url = url
        self._ledger = ledger
        self._jobs = jobs
        self._share = share
        self._random = Random(seed)
        self._left: list[Case] = []  # of the cases that are to come before one comes again
        self._timeout_s = timeout_s

    def run(self, stop: threading.Event) -> None:
        """Run one client, which sends all its requests one after the other."""
        sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        options = [*CHANNEL_OPTIONS, *sizes]
        with grpc.insecure_channel(self._channel_url, options=options) as channel:
            while not stop.wait(0.005):
                if self._ledger.share_of_hostile() >= self._share:
                    continue
                if self._random.random() < HANG_UP_SHARE:
                    job = self._random.choice(self._jobs)
                    self._ledger.close("http", Plan(job, kind=UNARY), self._hang_up(job))
                else:
                    case = self._next_case()
                    answer = self._send(case, channel)
                    self._ledger.close(case.transport, Plan(case, kind=WORST), answer)

    def _next_case(self) -> Case:
        if not self._left:
            self._left = list(all_cases())
            self._random.shuffle(self._left)
            # Taken from the end. The engine's first guide opens a process, which the baseline should have.
            self._left.sort(key=lambda case: case.is_allowed and "guided_decoding_guide" in case.fields)
        return self._left.pop()

    def _hang_up(self, job: Job) -> Answer:
        """Send a request of generate, and hang up without reading its answer."""
        answer = Answer(time.monotonic(), was_cancelled=True)
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            connection.request("POST", "/v2/models/faser/generate", json.dumps(dict(job.fields)).encode())
            time.sleep(self._random.choice((0.0, 0.01, 0.2)))
        except (OSError, http.client.HTTPException) as error:
            answer.error = _words(error)
        finally:
            connection.close()
        answer.ended_s = time.monotonic()
        return answer

    def _send(self, case: Case, channel: grpc.Channel) -> Answer:
        answer = Answer(time.monotonic())
        body = case.body()
        answers = self._http(case, body, answer) if case.transport == "http" else self._grpc(body, channel)
        try:
            for error in answers:
                answer.error = answer.error or error or None
            answer.finish_reason = None if answer.error else "served"
        except grpc.RpcError as error:
            answer.error = f"{error.code().name} {' '.join((error.details() or '').split())}"
        except (OSError, http.client.HTTPException) as error:
            answer.error = _words(error)
        answer.ended_s = time.monotonic()
        return answer

    def _http(self, case: Case, body: bytes, answer: Answer) -> Iterator[str]:
        """Yield the errors among the lines, and "" for other lines."""
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            connection.request("POST", "/v2/models/faser/generate_stream", body)
            for line in connection.getresponse():
                yield line.decode(errors="replace").strip() if _NOT_TEXT in line[:80] else ""
                if case.is_endless and time.monotonic() - answer.sent_s > _ENDLESS_S:
                    answer.was_cancelled = True
                    return
        finally:
            connection.close()

    def _grpc(self, body: bytes, channel: grpc.Channel) -> Iterator[str]:
        for message in channel.stream_stream(STREAM)(iter([body]), timeout=self._timeout_s):
            yield message.decode(errors="replace") if message.startswith(_ERROR_TAG) else ""


@contextlib.contextmanager
def idle_connections(urls: Sequence[str], number: int) -> Iterator[None]:
    """Keep connections that send nothing open to these servers in turn; reopen those that a server closes."""
    addresses = [(urlsplit(url).hostname or "", urlsplit(url).port or 80) for url in urls]
    stop = threading.Event()
    thread = threading.Thread(target=_keep_open, args=(addresses, number, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _keep_open(addresses: Sequence[tuple[str, int]], number: int, stop: threading.Event) -> None:
    sockets: list[socket.socket | None] = [None] * number
    while not stop.wait(1.0):
        for place, sock in enumerate(sockets):
            if sock is not None and _is_closed(sock):
                sock.close()
                sockets[place] = sock = None
            if sock is None:
                with contextlib.suppress(OSError):  # the server is down
                    sockets[place] = socket.create_connection(addresses[place % len(addresses)], timeout=1.0)
    for sock in sockets:
        if sock is not None:
            sock.close()


def _is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while data := sock.recv(4096):  # gRPC's server greets
            del data
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
