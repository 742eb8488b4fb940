"""The engine process's end of the socket to the Triton backend.

Any thread may send. One thread writes, in run_writer(), and asks for the responses that are due before each write.
Outputs that arrive while the socket is busy are thus merged, so a slow backend gets fewer and larger responses. With
rest_at_most() the writer also pauses after each write, which merges more under load; urgent responses end the pause.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.wire import Body, FromBackend, ToBackend, WireError

MAX_RESPONSES_BYTES = 16 << 20  # per frame, unless a single response is larger
MAX_REST_S = 0.05  # with stream_interval auto; short enough that readers of a stream do not notice
_REST_RATIO = 9.0  # seconds of rest per second of work, up to MAX_REST_S: the writer runs a tenth of the time
_LENGTH = struct.Struct("<I")

log = logging.getLogger("faser.engine")


class Connection:
    """Reads and writes frames on a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self._changed = threading.Condition(threading.Lock())
        self._frames: list[bytes] = []
        self._is_due = False
        self._is_urgent = False
        self._max_rest_s = 0.0
        self._is_idle = True
        self._closed = False

    def receive(self) -> Iterator[tuple[FromBackend, Body]]:
        """Wait for frames and return (type, body) of each, at least one; raise EOFError at the end, or WireError."""
        while True:
            data = self._sock.recv(1 << 18)
            if not data:
                raise EOFError
            self._received += data
            whole = self._take_whole()
            if whole:
                return self._frames_of(whole)

    def send(self, kind: ToBackend, *parts: bytes) -> None:
        """Queue a frame; it is dropped if the connection is closed."""
        with self._changed:
            self._frames.append(wire.frame(kind, *parts))
            self._wake()

    def notify(self, is_urgent: bool = True) -> None:
        """Tell the writer that responses are due; urgent ones also end its rest."""
        with self._changed:
            self._is_due = True
            self._is_urgent |= is_urgent
            self._wake()

    def rest_at_most(self, seconds: float) -> None:
        """Set the longest rest of the writer between two writes; it is 0 by default."""
        self._max_rest_s = seconds

    def run_writer(self, produce: Callable[[bool], list[bytes]]) -> None:
        """Write until the connection is closed. produce(True) returns all due responses, produce(False) urgent ones."""
        rested_s = 0.0
        while self._wait_for_work(rested_s):
            started_s = time.monotonic()
            everything = started_s >= rested_s
            with self._changed:
                self._is_idle = self._is_urgent = False
                self._is_due &= not everything
            responses = produce(everything)
            with self._changed:
                frames, self._frames = self._frames, []
            try:
                for data in (*_packed(responses), *frames):
                    self._sock.sendall(data)
            except OSError as error:
                if not isinstance(error, ConnectionError):  # else the backend hung up
                    log.error("nothing more can be sent to the Triton backend: %s", error)
                self.close()
                return
            if everything:
                ended_s = time.monotonic()
                rested_s = ended_s + min(_REST_RATIO * (ended_s - started_s), self._max_rest_s)
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued was written; return False if that takes longer than timeout_s."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or (self._is_idle and not (self._frames or self._is_due)),
                timeout_s,
            )

    def close(self) -> None:
        """Close the connection: receive() raises EOFError, and the writer ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _wait_for_work(self, rested_s: float) -> bool:
        """Wait for work, until the time rested_s only for urgent work; return False once the connection is closed."""
        with self._changed:
            while not self._closed:
                left_s = rested_s - time.monotonic()
                if self._is_urgent or self._frames or (self._is_due and left_s <= 0):
                    return True
                self._changed.wait(left_s if self._is_due else None)
            return False

    def _wake(self) -> None:
        if self._is_idle:
            self._changed.notify_all()

    def _take_whole(self) -> bytes:
        """Remove and return the received bytes of all complete frames."""
        received, end = self._received, 0
        while len(received) - end >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, end)
            if not 0 < length <= wire.MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes, allowed are 1 to {wire.MAX_FRAME_BYTES}")
            if len(received) - end - _LENGTH.size < length:
                break
            end += _LENGTH.size + length
        if not end:
            return b""
        whole = bytes(memoryview(received)[:end])
        del received[:end]
        return whole

    @staticmethod
    def _frames_of(whole: bytes) -> Iterator[tuple[FromBackend, Body]]:
        view, at = memoryview(whole), 0
        while at < len(whole):
            (length,) = _LENGTH.unpack_from(whole, at)
            at += _LENGTH.size
            try:
                kind = FromBackend(whole[at])
            except ValueError:
                raise WireError(f"a frame of unknown type {whole[at]}") from None
            yield kind, Body(view[at + 1 : at + length])
            at += length


def _packed(responses: list[bytes]) -> Iterator[bytes]:
    """Pack responses into as few frames as possible, of at most MAX_RESPONSES_BYTES each."""
    first, num_bytes = 0, 0
    for place, response in enumerate(responses):
        if num_bytes and num_bytes + len(response) > MAX_RESPONSES_BYTES:
            yield wire.frame(ToBackend.RESPONSES, *responses[first:place])
            first, num_bytes = place, 0
        num_bytes += len(response)
    if responses:
        yield wire.frame(ToBackend.RESPONSES, *responses[first:])
