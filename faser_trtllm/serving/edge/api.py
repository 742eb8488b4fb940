"""What TritonModel uses of triton_python_backend_utils, with frames to the Triton backend `faser` behind it."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from faser_trtllm.errors import FaserError
from faser_trtllm.serving.edge import wire
from faser_trtllm.serving.edge.connection import EdgeConnection
from faser_trtllm.serving.edge.wire import InputTensor, RequestFrame, ToEdge

_DECLARE, _ADD, _SET, _OBSERVE = 1, 2, 3, 4
_CHANGE = struct.Struct("<BId")
_DECLARATION = struct.Struct("<BIB")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An output."""

    name: str
    array: npt.NDArray[Any]


class TritonError:
    """An error for a client. code: one of the names in wire.ERROR_CODES, each of which is an attribute too."""

    def __init__(self, message: str, code: str) -> None:
        self.message = message
        self.code = code


for _code in wire.ERROR_CODES:
    setattr(TritonError, _code, _code)


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    output_tensors: Sequence[Tensor] = ()
    error: TritonError | None = None


class EdgeRequest:
    """A request and the sender of its responses."""

    def __init__(
        self, frame: RequestFrame, wanted: Collection[str], connection: EdgeConnection, on_end: Callable[[int], None]
    ) -> None:
        """wanted: names of the outputs to send. on_end: receives the handle after the last response."""
        self._frame: RequestFrame | None = frame
        self._wanted = wanted
        self._connection = connection
        self._on_end = on_end
        self._id = frame.request_id
        self._wants_error_code = frame.wants_error_code
        self._handle = frame.handle
        self.cancelled = False

    def inputs(self) -> Sequence[InputTensor]:
        return self._frame.inputs if self._frame is not None else ()

    def forget_inputs(self) -> None:
        """Free the memory of the inputs."""
        self._frame = None

    def request_id(self) -> str:
        return self._id

    def parameters(self) -> str:
        return '{"error_codes": true}' if self._wants_error_code else "{}"

    def is_cancelled(self) -> bool:
        return self.cancelled

    def get_response_sender(self) -> EdgeRequest:
        return self

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Queue a response, or the final flag alone."""
        handle, wanted = self._handle, self._wanted
        if response is None:
            self._connection.respond(wire.final_flag(handle))
        elif response.error is not None:
            self._connection.respond(wire.error_response(handle, response.error.code, response.error.message))
        else:
            outputs = [wire.output_tensor(t.name, t.array) for t in response.output_tensors if t.name in wanted]
            self._connection.respond(wire.response(handle, outputs, bool(flags)))
        if flags:
            self._on_end(handle)


class EdgeApi:
    """Stands in for the module triton_python_backend_utils; one for each connection."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = Tensor
    TritonError = TritonError
    InferenceResponse = InferenceResponse
    TritonModelException = FaserError

    def __init__(self, connection: EdgeConnection) -> None:
        self._changes = _Changes(connection)
        self.MetricFamily = type("MetricFamily", (_MetricFamily,), {"changes": self._changes})

    def flush_metrics(self) -> None:
        """Send the changes of metrics since the last call."""
        self._changes.flush()


class _Changes:
    """Changes of metrics that wait to be sent."""

    def __init__(self, connection: EdgeConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._data = bytearray()
        self._ids = itertools.count(1)

    def declare(self, kind: int, name: str, help_text: str, labels: dict[str, str], buckets: Sequence[float]) -> int:
        number = next(self._ids)
        parts = [_DECLARATION.pack(_DECLARE, number, kind), wire.text(name), wire.text(help_text)]
        parts.append(struct.pack("<I", len(labels)))
        for label, value in labels.items():
            parts += wire.text(label), wire.text(value)
        parts.append(struct.pack(f"<I{len(buckets)}d", len(buckets), *buckets))
        self.put(b"".join(parts))
        return number

    def put(self, change: bytes) -> None:
        with self._lock:
            was_empty = not self._data
            self._data += change
        if was_empty:
            self._connection.notify(is_urgent=False)

    def flush(self) -> None:
        with self._lock:
            data, self._data = self._data, bytearray()
        if data:
            self._connection.send(ToEdge.METRICS, bytes(data))


class _Metric:
    def __init__(self, changes: _Changes, number: int) -> None:
        self._changes = changes
        self._number = number

    def increment(self, value: float) -> None:
        self._changes.put(_CHANGE.pack(_ADD, self._number, value))

    def set(self, value: float) -> None:
        self._changes.put(_CHANGE.pack(_SET, self._number, value))

    def observe(self, value: float) -> None:
        self._changes.put(_CHANGE.pack(_OBSERVE, self._number, value))


class _MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)
    changes: _Changes

    def __init__(self, name: str, description: str, kind: int) -> None:
        self._name = name
        self._help = description
        self._kind = kind

    def Metric(self, labels: dict[str, str], buckets: Sequence[float] = ()) -> _Metric:  # noqa: N802 Triton's name
        return _Metric(self.changes, self.changes.declare(self._kind, self._name, self._help, labels, buckets))
