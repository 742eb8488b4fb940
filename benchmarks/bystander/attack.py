"""Send one worst request repeatedly for a while, as raw bytes."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc

from benchmarks.bystander.canary import STREAM
from benchmarks.bystander.cases import Case

_PAUSE_S = 0.1
_PATIENCE_S = 120.0
_ERROR_TAG = b"\x0a"  # field 1 of ModelStreamInferResponse


@dataclass
class Sent:
    """Outcome of an attack's requests. refused_ms: the time of each refused request; message: the last error."""

    num_served: int = 0
    refused_ms: list[float] = field(default_factory=list)
    message: str = ""

    @property
    def is_refused(self) -> bool:
        return not self.num_served


class Attacker:
    """A client of the server's HTTP and gRPC ports."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self._http_port = http_port
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{grpc_port}",
            options=[
                ("grpc.enable_http_proxy", 0),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
            ],
        )

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.close()

    def run(self, case: Case, seconds: float) -> Sent:
        """Send the case repeatedly for this many seconds; then hang up on an endless request."""
        body, sent, end_s = case.body(), Sent(), time.monotonic() + seconds
        while time.monotonic() < end_s:
            begun_s = time.monotonic()
            error = self._ask(case, body, end_s if case.is_endless else float("inf"))
            if error is None:
                sent.num_served += 1
            else:
                sent.refused_ms.append(1e3 * (time.monotonic() - begun_s))
                sent.message = error
            time.sleep(_PAUSE_S)
        return sent

    def _ask(self, case: Case, body: bytes, end_s: float) -> str | None:
        """Send one request; return its error, or None if it was served."""
        answers = self._http(body, end_s) if case.transport == "http" else self._grpc(body)
        try:
            return next((answer for answer in answers if answer), None)
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"

    def _http(self, body: bytes, end_s: float) -> Iterator[str]:
        """Yield errors, and "" for other answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=_PATIENCE_S)
        try:
            connection.request("POST", "/v2/models/faser/generate_stream", body)
            answer = connection.getresponse()
            for line in answer:
                if b'"error"' in line[:80]:
                    yield line.decode(errors="replace")[:300]
                if time.monotonic() > end_s:
                    return
        finally:
            connection.close()

    def _grpc(self, body: bytes) -> Iterator[str]:
        try:
            for message in self._channel.stream_stream(STREAM)(iter([body]), timeout=_PATIENCE_S):
                yield message[:300].decode(errors="replace") if message.startswith(_ERROR_TAG) else ""
        except grpc.RpcError as error:
            yield str(error.details())[:300]
