"""The frames of plugins/triton, as its C++ writes and reads them."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.wire import BYTES, ToBackend

DTYPES = {np.dtype(kind): number for number, kind in wire.DTYPES.items()}


class Refusal(NamedTuple):
    """The error record of a response: texts are empty where an error is about no field."""

    code: int
    message: str
    field: str = ""
    value: str = ""
    limit: str = ""


def packed(kind, content):
    return struct.pack("<IB", len(content) + 1, kind) + content


def read_frame(sock):
    length, kind = struct.unpack("<IB", receive(sock, 5))
    return ToBackend(kind), receive(sock, length - 1)


def receive(sock, size):
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part, "the connection was closed"
        data += part
    return data


def texts_array(rows):
    array = np.empty((len(rows), len(rows[0])), np.object_)
    for place, row in enumerate(rows):
        array[place] = row
    return array


def packed_text(value):
    return struct.pack("<I", len(value.encode())) + value.encode()


def content_of(array):
    if array.dtype == np.object_:
        return BYTES, b"".join(struct.pack("<I", len(item)) + item for item in array.reshape(-1))
    return DTYPES[array.dtype], array.tobytes()


def request_body(model, handle, request_id, outputs, inputs, client_key=""):
    """Return the body that plugins/triton/requests.cpp writes for a request."""
    parts = [struct.pack("<IQ", model, handle), packed_text(request_id)]
    parts += [packed_text("".join(f"{name}\n" for name in outputs)), struct.pack("<I", len(inputs))]
    for name, array in inputs:
        number, content = content_of(array)
        parts += [packed_text(name), struct.pack(f"<BI{array.ndim}q", number, array.ndim, *array.shape)]
        parts += [struct.pack("<Q", len(content)), content]
    return b"".join([*parts, packed_text(client_key)])


def read_responses(body):
    """Read a body of responses as plugins/triton/requests.cpp does."""
    at, found = 0, []

    def take(layout):
        nonlocal at
        values = struct.unpack_from(f"<{layout}", body, at)
        at += struct.calcsize(f"<{layout}")
        return values if len(values) > 1 else values[0]

    while at < len(body):
        handle, flags = take("QB")
        outputs, error = {}, None
        if flags & wire.ERROR:
            error = Refusal(take("B"), *(take(f"{take('I')}s").decode() for _ in range(4)))
        elif flags & wire.OUTPUTS:
            for _ in range(take("H")):
                name = take(f"{take('B') + 1}s")
                assert name[-1] == 0
                number, num_dims = take("BB")
                shape = tuple(take("q") for _ in range(num_dims))
                outputs[name[:-1].decode()] = number, shape, take(f"{take('I')}s")
        found.append((handle, bool(flags & wire.FINAL), outputs, error))
    return found
