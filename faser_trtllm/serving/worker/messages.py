"""Messages between Triton's stub and the engine child, and the socket that carries them.

A frame is the length of its body (4 bytes, little endian) and the body, one msgpack message.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

import msgspec

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.executor.stats import Progress
from faser_trtllm.serving.text.request import Statistics, TextRequest

MAX_FRAME_BYTES = 64 << 20
MAX_BACKLOG_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    id: int
    request: TextRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Like Cancel, but the request ends with a Chunk: the rest of its output and finish reason "cancelled"."""

    id: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks for a Pong, which the engine child sends from the thread that receives requests."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Tells the engine child to refuse new requests, finish the running ones, and exit."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engines are loaded; sent once."""

    vocab_size: int
    max_seq_len: int
    max_draft_len: int


class Chunk(msgspec.Struct, frozen=True, tag="chunk", omit_defaults=True):
    """New output of a request, as in TextOutput; the last chunk has a finish_reason."""

    id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    statistics: Statistics | None = None
    log_probs: tuple[float, ...] = ()
    logits: bytes = b""
    is_draft: tuple[bool, ...] = ()

    @property
    def is_final(self) -> bool:
        return self.finish_reason is not None

    def followed_by(self, chunk: Chunk) -> Chunk:
        """This chunk and the next as one."""
        return Chunk(
            id=self.id,
            text=self.text + chunk.text,
            token_ids=self.token_ids + chunk.token_ids,
            finish_reason=chunk.finish_reason,
            statistics=chunk.statistics,
            log_probs=self.log_probs + chunk.log_probs,
            logits=self.logits + chunk.logits,
            is_draft=self.is_draft + chunk.is_draft,
        )


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request ended with an error. code: a Triton status. id None: the engine cannot start."""

    id: int | None
    code: str
    message: str


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """The engine child refuses new requests and exits when the running ones have ended."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """stats: Executor.stats(). progress: whether the executor hangs, which this answer alone does not show."""

    stats: dict[str, float]
    progress: Progress = Progress()


ToEngine = Submit | Cancel | Stop | Ping | Drain
FromEngine = Ready | Chunk | Failed | Draining | Pong
Message = ToEngine | FromEngine


class ConnectionClosedError(Exception):
    """The peer hung up or sent something that is not a message."""


class Connection:
    """Sends and receives messages over a stream socket. Any thread may send; one thread receives.

    Sending never blocks: a separate thread writes what the socket does not accept at once, so a stalled reader cannot
    block the executor. The connection is closed when the backlog exceeds MAX_BACKLOG_BYTES.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._received = bytearray()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._backlog = bytearray()
        self._closed = False
        self._writer: threading.Thread | None = None

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Send or queue a message; raises ConnectionClosedError, or InvalidArgumentError if too large."""
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise InvalidArgumentError(f"the request has {len(body)} bytes, allowed are at most {MAX_FRAME_BYTES}")
        frame = _LENGTH.pack(len(body)) + body
        with self._lock:
            if self._closed:
                raise ConnectionClosedError("the connection is closed")
            if not self._backlog:
                num_sent = self._send_now(frame)
                if num_sent == len(frame):
                    return
                frame = frame[num_sent:]
            self._backlog += frame
            if len(self._backlog) > MAX_BACKLOG_BYTES:
                self._shut()
                raise ConnectionClosedError("the other side does not read")
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_backlog, name="faser-writer", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def receive(self, timeout_s: float | None = None) -> list[Message]:
        """Wait for at least one message and return all that have arrived; [] after timeout_s.

        Chunks of one request that arrived together are merged: a slow receiver sends fewer, larger responses.
        Raises ConnectionClosedError at the end of the stream or on bytes that are not a message.
        """
        while True:
            messages = self._take_messages()
            if messages:
                return _merged(messages)
            try:
                if timeout_s is not None and not select.select([self._sock], [], [], timeout_s)[0]:
                    return []
                data = self._sock.recv(1 << 18)
            except (OSError, ValueError) as error:
                raise ConnectionClosedError(str(error)) from error
            if not data:
                raise ConnectionClosedError("the other side closed the connection")
            self._received += data

    def flush(self, timeout_s: float) -> bool:
        """Wait until the socket has taken everything that was sent; False if it did not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._backlog or self._closed, timeout_s)

    def shutdown(self) -> None:
        """Close both directions: receive() returns on either side, and sending fails from now on."""
        with self._lock:
            self._shut()

    def close(self) -> None:
        """Shut down and free the socket; the receiving thread must have ended."""
        self.shutdown()
        if self._writer is not None:
            self._writer.join()
        self._sock.close()

    def _shut(self) -> None:
        self._closed = True
        self._backlog.clear()
        self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _send_now(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._shut()
            raise ConnectionClosedError(str(error)) from error

    def _take_messages(self) -> list[Message]:
        messages: list[Message] = []
        received, start = self._received, 0
        while len(received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, start)
            if length > MAX_FRAME_BYTES:
                raise ConnectionClosedError(f"a frame of {length} bytes, allowed are at most {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(received) < end:
                break
            try:
                messages.append(self._decoder.decode(memoryview(received)[start + _LENGTH.size : end].tobytes()))
            except msgspec.MsgspecError as error:
                raise ConnectionClosedError(f"a frame is not a message: {error}") from error
            start = end
        del received[:start]
        return messages

    def _write_backlog(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog or self._closed)
                if self._closed:
                    return
            select.select([], [self._sock], [], 0.1)
            with self._changed:
                if self._closed:
                    return
                with contextlib.suppress(ConnectionClosedError):
                    del self._backlog[: self._send_now(self._backlog)]
                self._changed.notify_all()


def _merged(batch: list[Message]) -> list[Message]:
    if len(batch) < 2:
        return batch
    merged: list[Message] = []
    last: dict[int, int] = {}
    for message in batch:
        if isinstance(message, Chunk):
            at = last.get(message.id)
            if at is not None:
                before = merged[at]
                assert isinstance(before, Chunk)
                merged[at] = before.followed_by(message)
                continue
            last[message.id] = len(merged)
        merged.append(message)
    return merged
