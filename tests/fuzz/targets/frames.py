"""Frames of the Triton backend: as such, and the requests in them up to what the executor gets."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from faser_trtllm.errors import FaserError
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.connection import Connection
from faser_trtllm.serving.engine_process.metrics import MetricChanges, ModelMetrics
from faser_trtllm.serving.engine_process.model import ModelConfig, ServedModel
from faser_trtllm.serving.engine_process.wire import Body, FromBackend, WireError
from faser_trtllm.serving.text.service import TextGenerator
from faser_trtllm.serving.triton.contract import INPUTS, MODELS
from faser_trtllm.serving.triton.request import check_request_id
from tests.fuzz.target import Codec, Target
from tests.fuzz.targets.served import tokenizer
from tests.support.backend_frames import packed, packed_text, request_body
from tests.support.fake_engine import EchoExecutor

# frames


def run_wire(data: bytes) -> None:
    """A stream of the backend, as the engine process takes it apart."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(theirs)
        sender = threading.Thread(target=_send, args=(ours, data))
        sender.start()
        try:
            with contextlib.suppress(EOFError):
                while True:
                    for kind, body in connection.receive():
                        _read_frame(kind, body)
        finally:
            connection.close()
            sender.join()


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)


def _read_frame(kind: FromBackend, body: Body) -> None:
    if kind is FromBackend.REQUEST:
        frame = wire.read_request(body)
        with contextlib.suppress(UnicodeDecodeError):
            wire.output_names(frame.outputs)
        with contextlib.suppress(FaserError):
            frame.tensors(lambda name, shape, num_bytes, is_text: None)
    elif kind is FromBackend.OPEN:
        opened = wire.read_open(body)
        with contextlib.suppress(ValueError):
            ModelConfig.of(opened).flag("normalize_log_probs", False)
    elif kind is FromBackend.CANCEL:
        body.numbers(struct.Struct("<Q"))
    elif kind is FromBackend.CLOSE:
        body.u32()


def _texts(*values: Any) -> Any:
    array = np.empty((1, len(values)), np.object_)
    array[0] = [value.encode() if isinstance(value, str) else value for value in values]
    return array


def _value_of(name: str, dtype: str) -> Any:
    if dtype == "BYTES":
        known = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+", "drafters": "suffix"}
        return _texts(known.get(name, "hello"))
    kinds: dict[str, Any] = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}
    return np.ones((1, 1), kinds[dtype])


def requests() -> list[bytes]:
    """Bodies of requests: each input by itself, some together, batches; for each of the models."""
    text = {"text_input": _texts("hello"), "max_tokens": np.array([[4]], np.int32)}
    ids: dict[str, Any] = {"input_ids": np.array([[5, 6, 7]], np.int32), "input_lengths": np.array([[3]], np.int32)}
    ids |= {"request_output_len": np.array([[4]], np.int32)}
    given = [text | {name: _value_of(name, dtype)} for name, dtype in INPUTS.items()]
    given.append(text | {name: _value_of(name, INPUTS[name]) for name in ("stream", "stop_words", "bad_words", "seed")})
    given.append(text | {"num_return_sequences": np.array([[3]], np.int32), "seed": np.array([[7]], np.uint64)})
    words = {"embedding_bias_words": _texts("a", "b"), "embedding_bias_weights": np.ones((1, 2), np.float32)}
    given.append(
        text | words | {"logit_bias_ids": np.ones((1, 1), np.int32), "logit_bias_values": np.ones((1, 1), "f4")}
    )
    batch = {"text_input": np.array([[b"a"], [b"b"]], np.object_), "max_tokens": np.array([[4], [5]], np.int32)}
    bodies = [request_body(0, 1, "id", ["text_output"], list(inputs.items())) for inputs in (*given, batch)]
    lists = {name: np.array([[[3, 4, 5], [1, 3, -1]]], np.int32) for name in ("stop_words_list", "bad_words_list")}
    bias = {"embedding_bias": np.eye(1, 320, 5, np.float32)}
    for inputs in (ids, ids | lists, ids | bias, {name: np.repeat(array, 2, 0) for name, array in ids.items()}):
        bodies.append(request_body(3, 2, "", ["output_ids"], list(inputs.items())))
    return [*bodies, *(request_body(model, 3, "x", [], list(text.items())) for model in (1, 2))]


def _decode_request(data: bytes) -> Any:
    frame = wire.read_request(Body(memoryview(data)))
    inputs = [[t.name, t.dtype, list(t.shape), bytes(t.content)] for t in frame.inputs]
    return [frame.model, frame.handle, frame.request_id, frame.outputs, inputs, frame.client_key]


def _encode_request(value: Any) -> bytes:
    model, handle, request_id, outputs, inputs, client_key = value
    parts = [struct.pack("<IQ", model, handle), packed_text(request_id), struct.pack("<I", len(outputs)), outputs]
    parts.append(struct.pack("<I", len(inputs)))
    for name, dtype, shape, content in inputs:
        parts += [packed_text(name), struct.pack(f"<BI{len(shape)}q", dtype, len(shape), *shape)]
        parts += [struct.pack("<Q", len(content)), content]
    return b"".join([*parts, packed_text(client_key)])


def _decode_stream(data: bytes) -> Any:
    found, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        kind, body = data[at + 4], data[at + 5 : at + 4 + length]
        found.append([kind, _decode_request(body) if kind == FromBackend.REQUEST else body])
        at += 4 + length
    return found


def _encode_stream(value: Any) -> bytes:
    return b"".join(packed(kind, body if isinstance(body, bytes) else _encode_request(body)) for kind, body in value)


def wire_seeds() -> list[bytes]:
    config = json.dumps({"parameters": {"engine_dir": {"string_value": "E"}}, "model_transaction_policy": {}})
    texts = b"".join(map(packed_text, ("faser", "1", "/nowhere", config)))
    first = packed(FromBackend.HELLO, struct.pack("<II", wire.VERSION, 0)) + packed(FromBackend.OPEN, bytes(4) + texts)
    last = packed(FromBackend.CANCEL, bytes(8)) + packed(FromBackend.PING, b"") + packed(FromBackend.CLOSE, bytes(4))
    bodies = requests()
    return [
        first + last,
        *(packed(FromBackend.REQUEST, body) for body in bodies[::8]),
        first + packed(4, bodies[0]) + last,
    ]


# tensors

_CONFIGS = Path(__file__).parents[3] / "triton_model_repo"
_INPUT = re.compile(r'name: "(\w+)"\s+data_type: TYPE_(\w+)\s+dims: \[([^]]*)\]')
_NUMBERS = {np.dtype(kind).name.upper(): number for number, kind in wire.DTYPES.items()}
_NUMBERS |= {"STRING": wire.BYTES, "FP16": 10, "FP32": 11, "BOOL": 1}


@functools.cache
def _declared(model: str) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Number of the type, and dims, of each input."""
    text = (_CONFIGS / model / "config.pbtxt").read_text()
    text = text[text.index("input [") : text.index("output [")]
    return {
        name: (_NUMBERS[kind], tuple(int(dim) for dim in dims.split(","))) for name, kind, dims in _INPUT.findall(text)
    }


def _check_as_triton(model: str, frame: wire.RequestFrame) -> None:
    """WireError for what Triton refuses itself: names, types and dims that config.pbtxt does not declare."""
    declared = _declared(model)
    for tensor in frame.inputs:
        dtype, dims = declared.get(tensor.name, (0, ()))
        batch, *shape = tensor.shape or (0,)
        fits = len(shape) == len(dims) and all(wanted in (-1, size) for wanted, size in zip(dims, shape, strict=True))
        if dtype != tensor.dtype or not fits or not 1 <= batch <= 64 or min(tensor.shape) < 0:
            raise WireError(f"Triton lets no such {tensor.name} through")


@functools.cache
def _models() -> tuple[tuple[ServedModel, ...], TextGenerator]:
    generator = TextGenerator(EchoExecutor(), tokenizer())
    changes = MetricChanges(SimpleNamespace(send=lambda *parts: None))  # type: ignore[arg-type]
    served = tuple(
        ServedModel(i, contract, True, False, ModelMetrics(changes, contract.name, "1"), generator.cancel)
        for i, contract in enumerate(MODELS.values())
    )
    return served, generator


def run_triton(data: bytes) -> None:
    """A request's frame up to what the executor gets."""
    frame = wire.read_request(Body(memoryview(data)))
    served, generator = _models()
    model = served[frame.model % len(served)]
    _check_as_triton(model.contract.name, frame)
    check_request_id(frame.request_id)
    if frame.is_stop:
        return
    prepared, parts = None, model.parse(frame.tensors(model.check_input), frame.client_key)
    for part in parts:
        prepared = generator.prepare(part.request, like=prepared, num_sequences=len(parts))
        prepared.request.guide()


_REQUESTS = Codec(_decode_request, _encode_request)
_WORDS = (*INPUTS, "hello", "json", "json_schema", "regex", "ebnf_grammar")

TARGETS = (
    Target(
        "wire",
        run_wire,
        wire_seeds,
        ("serving/engine_process/wire.py",),
        Codec(_decode_stream, _encode_stream),
        (FaserError, WireError),
        _WORDS,
    ),
    Target(
        "triton_request",
        run_triton,
        requests,
        ("serving/triton/request.py", "serving/text/request.py", "serving/triton/contract.py"),
        _REQUESTS,
        (FaserError, WireError),
        _WORDS,
    ),
)
