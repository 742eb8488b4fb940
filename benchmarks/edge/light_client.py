"""A gRPC client that only counts responses, with plain sockets in one thread.

It reads responses of Triton's ModelStreamInfer (RFC 9113, gRPC over HTTP/2) only: windows have their largest size, so
at most 2 GiB per connection, and header blocks are not decoded.
"""

from __future__ import annotations

import selectors
import socket
import struct

_PATH = b"/inference.GRPCInferenceService/ModelStreamInfer"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_FRAME_HEADER = struct.Struct(">HBBBI")  # length in 16 and 8 bits, type, flags, stream
_MESSAGE_HEADER = struct.Struct(">BI")  # compressed, length
_WIDEST = 2**31 - 1
_ERROR_TAG = 0x0A  # field 1 of ModelStreamInferResponse
STREAMS_PER_CONNECTION = 16


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return _FRAME_HEADER.pack(len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """Encode a header field without indexing (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class Connection:
    """num_streams requests over one socket. num_responses: number of responses so far."""

    def __init__(self, port: int, num_streams: int, request: bytes) -> None:
        self.num_responses = 0
        self.num_open = num_streams
        self.socket = socket.create_connection(("127.0.0.1", port))
        self._rest = b""  # beginning of an incomplete frame
        self._parts: dict[int, bytes] = {}  # beginnings of incomplete messages, by stream
        fields = {b":method": b"POST", b":scheme": b"http", b":path": _PATH, b":authority": b"localhost"}
        fields |= {b"te": b"trailers", b"content-type": b"application/grpc"}
        block = b"".join(_literal(name, value) for name, value in fields.items())
        message = _MESSAGE_HEADER.pack(0, len(request)) + request
        sent = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, _WIDEST))]
        sent.append(_frame(8, 0, 0, struct.pack(">I", _WIDEST - 65_535)))  # WINDOW_UPDATE of the connection
        for stream in range(1, 2 * num_streams, 2):
            sent += [_frame(_HEADERS, _END_HEADERS, stream, block), _frame(_DATA, _END_STREAM, stream, message)]
        self.socket.sendall(b"".join(sent))

    def read(self) -> bool:
        """Read received bytes; return True while streams are open."""
        received = self.socket.recv(1 << 20)
        if not received:
            raise RuntimeError(f"the server closed a connection with {self.num_open} streams open")
        data, at = self._rest + received, 0
        while len(data) - at >= 9:
            high, low, kind, flags, stream = _FRAME_HEADER.unpack_from(data, at)
            begin, end = at + 9, at + 9 + (high << 8 | low)
            if end > len(data):
                break
            at = end
            if kind == _DATA:
                self._count(stream, data, begin, end)
            elif kind == _HEADERS:
                self.num_open -= flags & _END_STREAM
            elif kind in (_PING, _SETTINGS) and not flags & _ACK:
                self.socket.sendall(_frame(kind, _ACK, 0, data[begin:end] if kind == _PING else b""))
            elif kind in (_RST_STREAM, _GOAWAY):
                raise RuntimeError(f"the server sent frame {kind} for stream {stream}: {data[begin:end]!r}")
        self._rest = data[at:]
        return self.num_open > 0

    def _count(self, stream: int, data: bytes, begin: int, end: int) -> None:
        if part := self._parts.pop(stream, b""):
            data, begin, end = part + data[begin:end], 0, len(part) + end - begin
        while end - begin >= 5:
            size = _MESSAGE_HEADER.unpack_from(data, begin)[1]
            if begin + 5 + size > end:
                break
            if size and data[begin + 5] == _ERROR_TAG:
                raise RuntimeError(f"a stream failed: {data[begin + 5 : begin + 5 + size]!r}")
            self.num_responses += 1
            begin += 5 + size
        if begin < end:
            self._parts[stream] = data[begin:end]


def run_streams(port: int, num_streams: int, request: bytes) -> int:
    """Send the request num_streams times at once, and return the number of responses."""
    sizes = [STREAMS_PER_CONNECTION] * (num_streams // STREAMS_PER_CONNECTION)
    if rest := num_streams % STREAMS_PER_CONNECTION:
        sizes.append(rest)
    connections = [Connection(port, size, request) for size in sizes]
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        while selector.get_map():
            for key, _ in selector.select(timeout=300):
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
    return sum(connection.num_responses for connection in connections)
