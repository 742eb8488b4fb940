"""A second client in its own process, which continuously requests a few tokens and records when they arrive.

`python -m benchmarks.bystander.canary URL` writes a line of JSON per request until its input closes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.bystander.cases import Case

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
CANARY = Case(
    "canary",
    {"text_input": "def read_lines(path):\n", "max_tokens": 12, "end_id": -1, "stream": True},
    "grpc",
    client="canary",
)
_PAUSE_S = 0.01
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Asked:
    """One request of the canary. times_s: monotonic times of the request and each response."""

    times_s: tuple[float, ...]
    text: str
    error: str


@dataclass(frozen=True)
class Heard:
    """Delays of the canary in a period: ms to its first tokens, and ms between tokens."""

    first_ms: tuple[float, ...]
    gaps_ms: tuple[float, ...]

    def __add__(self, other: Heard) -> Heard:
        return Heard(self.first_ms + other.first_ms, self.gaps_ms + other.gaps_ms)


class Canary:
    """The canary's process and its reports, a context manager. asked: all requests that have ended."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.asked: list[Asked] = []
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> Canary:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_PATIENCE_S)
        self._thread.join()

    def heard(self, from_s: float, to_s: float) -> Heard:
        """Return the delays in a period, after waiting for a request that was sent after to_s."""
        self.wait(to_s)
        first: list[float] = []
        gaps: list[float] = []
        for one in self.asked:
            for number, (begin_s, end_s) in enumerate(zip(one.times_s, one.times_s[1:], strict=False)):
                if end_s > from_s and begin_s < to_s:
                    (gaps if number else first).append(1e3 * (end_s - begin_s))
        return Heard(tuple(first), tuple(gaps))

    def wait(self, sent_s: float) -> None:
        """Wait until a request sent after this time has ended; raises TimeoutError."""
        with self._more:
            found = self._more.wait_for(lambda: self.asked and self.asked[-1].times_s[0] > sent_s, _PATIENCE_S)
        if not found:
            raise TimeoutError(f"the canary has had no answer for {_PATIENCE_S:g} s")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            times_s, text, error = json.loads(line)
            with self._more:
                self.asked.append(Asked(tuple(times_s), text, error))
                self._more.notify_all()


def main_canary(url: str, closed: IO[Any]) -> None:
    """Send requests until the input is closed."""
    stop = threading.Event()

    def watch() -> None:
        closed.read()
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    body = CANARY.body()
    while not stop.is_set():
        with grpc.insecure_channel(url, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stream = channel.stream_stream(STREAM)
            for _ in range(500):
                print(json.dumps(_ask(stream, body)), flush=True)
                if stop.wait(_PAUSE_S):
                    break


def _ask(stream: Any, body: bytes) -> tuple[Sequence[float], str, str]:
    times_s, messages, error = [time.monotonic()], [], ""
    try:
        for message in stream(iter([body]), timeout=_PATIENCE_S):
            times_s.append(time.monotonic())
            messages.append(message)
    except grpc.RpcError as failure:
        times_s.append(time.monotonic())
        error = str(failure.details())
    answers = [service_pb2.ModelStreamInferResponse.FromString(message) for message in messages]
    error = error or next((answer.error_message for answer in answers if answer.error_message), "")
    return times_s, "".join(_text(answer.infer_response) for answer in answers), error


def _text(answer: Any) -> str:
    place = next((i for i, output in enumerate(answer.outputs) if output.name == "text_output"), None)
    return "" if place is None else answer.raw_output_contents[place][4:].decode()


if __name__ == "__main__":
    main_canary(sys.argv[1], sys.stdin)
