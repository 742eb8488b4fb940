"""Frames between the Triton backend `faser` (plugins/triton) and the engine process.

A frame is the length of the rest (4 bytes), a type (1 byte) and a body; numbers are little endian. The peer is
plugins/triton/wire.h, which has the same VERSION.
"""

from __future__ import annotations

import enum
import functools
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import FaserError, InvalidArgumentError

VERSION = 3
MAX_FRAME_BYTES = 80 << 20  # from the backend; a client's request has at most 64 MiB of tensors
MAX_RESPONSE_BYTES = 500 << 20  # the backend accepts frames of 512 MiB

BYTES = 13
DTYPES: dict[int, npt.DTypeLike] = {
    1: np.bool_,
    2: np.uint8,
    3: np.uint16,
    4: np.uint32,
    5: np.uint64,
    6: np.int8,
    7: np.int16,
    8: np.int32,
    9: np.int64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
}
"""The numbers of TRITONSERVER_DataType, except BYTES."""

_NUMBERS = {np.dtype(dtype): number for number, dtype in DTYPES.items()}

ERROR_CODES = {
    "UNKNOWN": 0,
    "INTERNAL": 1,
    "NOT_FOUND": 2,
    "INVALID_ARG": 3,
    "UNAVAILABLE": 4,
    "UNSUPPORTED": 5,
    "ALREADY_EXISTS": 6,
    "CANCELLED": 7,
}
"""The numbers of TRITONSERVER_Error_Code."""


class FromBackend(enum.IntEnum):
    """Types of frames that the Triton backend sends."""

    HELLO = 1
    OPEN = 2
    CLOSE = 3
    REQUEST = 4
    CANCEL = 5
    PING = 6


class ToBackend(enum.IntEnum):
    """Types of frames that the engine process sends."""

    HELLO = 1
    OPENED = 2
    RESPONSES = 3
    PONG = 4
    DRAINING = 5
    METRICS = 6


class OpenStatus(enum.IntEnum):
    OPENED = 0
    OTHER_CONFIGURATION = 1
    FAILED = 2


Tensors = dict[str, npt.NDArray[Any]]

FINAL, ERROR, OUTPUTS = 1, 2, 4  # flags of a response

_LARGE_BYTES = 64 << 10  # outputs from this size on are not copied
_MAX_STOP_BYTES = 64  # of the input stop that are read; a larger one fits no shape and is refused
_U32 = struct.Struct("<I")
_FRAME = struct.Struct("<IB")
_REQUEST = struct.Struct("<IQ")
_RESPONSE = struct.Struct("<QB")


class WireError(Exception):
    """The other side sent data that are not frames of this version."""


@dataclass(frozen=True, slots=True)
class OpenFrame:
    """The frame about a model that Triton has loaded. repository: the model's folder."""

    model: int
    name: str
    version: str
    repository: str
    config_json: str


@dataclass(frozen=True, slots=True)
class RequestFrame:
    """The frame of a client's request. num_bytes: the size of its body. arrived_s: of time.perf_counter()."""

    model: int
    handle: int
    request_id: str  # the client's own
    outputs: bytes  # requested outputs, each followed by a newline
    inputs: tuple[InputTensor, ...]
    num_bytes: int
    client_key: str = ""  # the client that the proxy names, if any
    arrived_s: float = field(default_factory=time.perf_counter, compare=False)

    @property
    def client_id(self) -> tuple[str, str]:
        """The client's key and its id for the request."""
        return self.client_key, self.request_id

    @property
    def is_stop(self) -> bool:
        """True if the frame asks to stop the requests with its id; its other inputs then do not matter."""
        return any(tensor.name == "stop" and any(tensor.content[:_MAX_STOP_BYTES]) for tensor in self.inputs)

    def tensors(self, check: Callable[[str, Sequence[int], int, bool], None]) -> Tensors:
        """Return the inputs by name; raise InvalidArgumentError if the bytes of one do not fit its shape.

        Before any is read, check(name, shape, num_bytes, is_text) may raise for each input.
        """
        for tensor in self.inputs:
            check(tensor.name, tensor.shape, len(tensor.content), tensor.dtype == BYTES)
        return {tensor.name: tensor.as_numpy() for tensor in self.inputs}


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input as Triton sends it."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    content: memoryview

    def as_numpy(self) -> npt.NDArray[Any]:
        """Return an array, of bytes objects for BYTES; raise InvalidArgumentError if the bytes do not fit the shape."""
        if self.dtype == BYTES:
            return self._texts()
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise InvalidArgumentError(f"{self.name} has a data type that is not supported; see the model's inputs")
        try:
            return np.frombuffer(self.content, dtype).reshape(self.shape)
        except ValueError:
            raise self._misfit() from None

    def _texts(self) -> npt.NDArray[Any]:
        texts: list[bytes] = []
        content, at, end = self.content, 0, len(self.content)
        while at < end:
            if at + 4 > end:
                raise self._misfit()
            (size,) = _U32.unpack_from(content, at)
            at += 4
            if size > end - at:
                raise self._misfit()
            texts.append(bytes(content[at : at + size]))
            at += size
        array = np.empty(len(texts), dtype=np.object_)
        array[:] = texts
        try:
            return array.reshape(self.shape)
        except ValueError:
            raise self._misfit() from None

    def _misfit(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self.name} has {len(self.content)} bytes that do not fit its shape {list(self.shape)}; send it again"
        )


class Body:
    """Reads numbers and texts from a frame's body; raises WireError instead of reading past its end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def num_left(self) -> int:
        """The number of bytes not read yet."""
        return len(self._data) - self._at

    def numbers(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.content(layout.size))

    def u32(self) -> int:
        return int(self.numbers(_U32)[0])

    def content(self, size: int) -> memoryview:
        end = self._at + size
        if end > len(self._data):
            raise WireError("a frame is shorter than it says")
        self._at, start = end, self._at
        return self._data[start:end]

    def text(self) -> str:
        return bytes(self.content(self.u32())).decode(errors="replace")


def read_open(body: Body) -> OpenFrame:
    return OpenFrame(body.u32(), body.text(), body.text(), body.text(), body.text())


def read_request(body: Body) -> RequestFrame:
    """Parse a REQUEST frame; raise WireError. The inputs' contents are views of the body."""
    num_bytes = body.num_left
    model, handle = body.numbers(_REQUEST)
    request_id = body.text()
    outputs = bytes(body.content(body.u32()))
    inputs = []
    for _ in range(body.u32()):
        name = body.text()
        (dtype, num_dims) = body.numbers(_DTYPE_AND_DIMS)
        shape = struct.unpack(f"<{num_dims}q", body.content(8 * num_dims))
        (size,) = body.numbers(_U64)
        inputs.append(InputTensor(name, dtype, shape, body.content(size)))
    return RequestFrame(model, handle, request_id, outputs, tuple(inputs), num_bytes, body.text())


@functools.lru_cache(maxsize=256)  # clients ask for few different sets of outputs, but could ask for many
def output_names(outputs: bytes) -> frozenset[str]:
    """Split RequestFrame.outputs into names."""
    return frozenset(outputs.decode().split())


_DTYPE_AND_DIMS = struct.Struct("<BI")
_U64 = struct.Struct("<Q")


def frame(kind: ToBackend, *parts: bytes) -> bytes:
    """Build a frame from the parts of its body."""
    return b"".join((_FRAME.pack(sum(map(len, parts)) + 1, kind), *parts))


def text(value: str) -> bytes:
    """Encode a text of a frame: length and UTF-8. A character that UTF-8 cannot encode becomes a question mark."""
    encoded = value.encode(errors="replace")
    return _U32.pack(len(encoded)) + encoded


def output_tensor(name: str, array: npt.NDArray[Any]) -> bytes:
    """Encode an output of a response; arrays of objects hold bytes."""
    content: bytes | memoryview
    if array.dtype == np.object_:
        number, content = BYTES, b"".join(_U32.pack(len(item)) + item for item in array.reshape(-1))
    else:
        number = _NUMBERS[array.dtype]
        # Logits can take tens of MiB, and copying them holds Python's lock.
        content = array.tobytes() if array.nbytes < _LARGE_BYTES else array.reshape(-1).view(np.uint8).data
    return b"".join((_heading(name, number, array.shape), _U32.pack(len(content)), content))


@functools.lru_cache(maxsize=4096)  # the responses of a step have few different shapes
def _heading(name: str, number: int, shape: tuple[int, ...]) -> bytes:
    label = name.encode()
    return struct.pack(f"<B{len(label) + 1}sBB{len(shape)}q", len(label), label + b"\0", number, len(shape), *shape)


def response(handle: int, outputs: Sequence[bytes], is_final: bool) -> bytes:
    """Encode a response with outputs of output_tensor(); raise InvalidArgumentError if it is too large."""
    flags = OUTPUTS | (FINAL if is_final else 0)
    num_bytes = sum(map(len, outputs))
    if num_bytes > MAX_RESPONSE_BYTES:
        raise InvalidArgumentError(
            f"the answer has {num_bytes} bytes, allowed are at most {MAX_RESPONSE_BYTES}; ask for less of it"
        )
    return b"".join((_RESPONSE.pack(handle, flags), len(outputs).to_bytes(2, "little"), *outputs))


def error_response(handle: int, error: FaserError, names: Mapping[str, str]) -> bytes:
    """Encode the last response of a request that failed. names: our field name -> the clients' name."""
    number = ERROR_CODES.get(error.code, ERROR_CODES["INTERNAL"])
    field = "" if error.field is None else names.get(error.field, error.field)
    record = (error.sentence(names), field, error.value or "", error.limit or "")
    return _RESPONSE.pack(handle, ERROR | FINAL) + bytes([number]) + b"".join(map(text, record))


def final_flag(handle: int) -> bytes:
    """Encode the end of a request without another response."""
    return _RESPONSE.pack(handle, FINAL)
