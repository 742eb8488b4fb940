"""Frames between the Triton backend `faser` (plugins/triton) and the engine process.

A frame is the length of the rest (4 bytes), a type (1 byte) and a body; numbers are little endian. The peer is
plugins/triton/wire.h, and VERSION is that of both.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import FaserError, InvalidArgumentError

VERSION = 3
MAX_FRAME_BYTES = 80 << 20  # of the backend; a client's request has at most 64 MiB of tensors
MAX_RESPONSE_BYTES = 500 << 20  # the backend takes frames of 512 MiB

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
"""Numbers of TRITONSERVER_DataType, with BYTES."""

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
"""Numbers of TRITONSERVER_Error_Code."""


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

_LARGE_BYTES = 64 << 10  # of an output
_U32 = struct.Struct("<I")
_FRAME = struct.Struct("<IB")
_REQUEST = struct.Struct("<IQ")
_RESPONSE = struct.Struct("<QB")


class WireError(Exception):
    """The other side sent something that is not a frame of this version."""


@dataclass(frozen=True, slots=True)
class OpenFrame:
    """Triton has loaded a model."""

    model: int
    name: str
    version: str
    repository: str
    config_json: str


@dataclass(frozen=True, slots=True)
class RequestFrame:
    """A request of a client. request_id: the client's own. outputs: those it asks for, each followed by a newline.

    client_key: who the proxy says that sent it, "" if it does not.
    """

    model: int
    handle: int
    request_id: str
    outputs: bytes
    inputs: tuple[InputTensor, ...]
    num_bytes: int
    client_key: str = ""

    @property
    def client_id(self) -> tuple[str, str]:
        """The request's id, among those of its client."""
        return self.client_key, self.request_id

    def tensors(self, check: Callable[[str, Sequence[int], int, bool], None]) -> Tensors:
        """The inputs by name; raises InvalidArgumentError if the bytes of one do not fit its shape.

        check: raises it for an input's name, shape, size in bytes, and whether it is text, before any is read.
        """
        for tensor in self.inputs:
            check(tensor.name, tensor.shape, len(tensor.content), tensor.dtype == BYTES)
        return {tensor.name: tensor.as_numpy() for tensor in self.inputs}


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input as Triton gives it; as_numpy() raises InvalidArgumentError if the bytes do not fit the shape."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    content: memoryview

    def as_numpy(self) -> npt.NDArray[Any]:
        """BYTES are an array of bytes objects, as in Triton's Python backend."""
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
    """Reads numbers and texts from a frame's body; raises WireError instead of reading beyond its end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def num_left(self) -> int:
        """Bytes that have not been read."""
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


@functools.lru_cache(maxsize=256)  # clients ask for few sets of outputs, but each could ask for others
def output_names(outputs: bytes) -> frozenset[str]:
    """Of RequestFrame.outputs."""
    return frozenset(outputs.decode().split())


_DTYPE_AND_DIMS = struct.Struct("<BI")
_U64 = struct.Struct("<Q")


def frame(kind: ToBackend, *parts: bytes) -> bytes:
    """A whole frame of these parts of a body."""
    return b"".join((_FRAME.pack(sum(map(len, parts)) + 1, kind), *parts))


def text(value: str) -> bytes:
    """A text within a frame; what UTF-8 cannot carry is replaced."""
    encoded = value.encode(errors="replace")
    return _U32.pack(len(encoded)) + encoded


def output_tensor(name: str, array: npt.NDArray[Any]) -> bytes:
    """An output within a response."""
    content: bytes | memoryview
    if array.dtype == np.object_:
        number, content = BYTES, b"".join(_U32.pack(len(item)) + item for item in array.reshape(-1))
    else:
        number = _NUMBERS[array.dtype]
        # Logits have tens of MiB, and copying them holds Python's lock.
        content = array.tobytes() if array.nbytes < _LARGE_BYTES else array.reshape(-1).view(np.uint8).data
    return b"".join((_heading(name, number, array.shape), _U32.pack(len(content)), content))


@functools.lru_cache(maxsize=4096)  # a step's responses have few shapes
def _heading(name: str, number: int, shape: tuple[int, ...]) -> bytes:
    label = name.encode()
    return struct.pack(f"<B{len(label) + 1}sBB{len(shape)}q", len(label), label + b"\0", number, len(shape), *shape)


def response(handle: int, outputs: Sequence[bytes], is_final: bool) -> bytes:
    """A response within a frame; raises InvalidArgumentError if it is too large. outputs: of output_tensor()."""
    flags = OUTPUTS | (FINAL if is_final else 0)
    num_bytes = sum(map(len, outputs))
    if num_bytes > MAX_RESPONSE_BYTES:
        raise InvalidArgumentError(
            f"the answer has {num_bytes} bytes, allowed are at most {MAX_RESPONSE_BYTES}; ask for less of it"
        )
    return b"".join((_RESPONSE.pack(handle, flags), len(outputs).to_bytes(2, "little"), *outputs))


def error_response(handle: int, error: FaserError, names: Mapping[str, str]) -> bytes:
    """The last response of a request that failed. names: fields that its clients know by other names."""
    number = ERROR_CODES.get(error.code, ERROR_CODES["INTERNAL"])
    field = "" if error.field is None else names.get(error.field, error.field)
    record = (error.sentence(names), field, error.value or "", error.limit or "")
    return _RESPONSE.pack(handle, ERROR | FINAL) + bytes([number]) + b"".join(map(text, record))


def final_flag(handle: int) -> bytes:
    """The end of a request without another response."""
    return _RESPONSE.pack(handle, FINAL)
