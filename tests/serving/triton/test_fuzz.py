"""Hostile input to a real server over real engines: it lives, answers in a sentence, and others notice nothing.

FASER_FUZZ_SECONDS=3600 goes on for an hour (pytest needs --timeout 4000 then); FASER_FUZZ_SEED starts elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import sys
import threading
import urllib.error
import urllib.request

import grpc
import pytest
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from faser_trtllm.serving.client import GrpcClient, ResponseError, generate_http
from tests.serving.triton.fuzz import DTYPES, check_message, fuzz, json_fields
from tests.support.engine_dirs import make_engine_dir
from tests.support.triton_server import ROOT, Server
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

SERVICE = "/inference.GRPCInferenceService"
METHODS = (
    "ServerLive",
    "ServerReady",
    "ServerMetadata",
    "ModelReady",
    "ModelMetadata",
    "ModelConfig",
    "ModelStatistics",
    "ModelInfer",
)
CANARY = {"text": "hello world", "max_tokens": 30, "end_id": -1}


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    sizes = {"max_batch_size": 64, "max_seq_len": 128, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), **sizes)


@pytest.fixture(scope="module")
def server(engine_dir, tmp_path_factory):
    with Server(engine_dir, speculation="fixed:4", log=tmp_path_factory.mktemp("log") / "log") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def secrets(engine_dir):
    # No literals: Hypothesis draws those of the sources too, and Triton repeats names that it does not know.
    return [str(engine_dir), str(ROOT), sys.prefix]


class Canary:
    """A well-behaved client, one stream after the other, whose text must not change."""

    def __init__(self, url):
        self._url = url
        self._expected = self._ask()
        self._stop = threading.Event()
        self.num_answers, self.wrong = 0, []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self):
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the canary's stream did not end"

    def _ask(self):
        with GrpcClient(self._url) as client:
            return "".join(response.text for response in client.stream(timeout_s=30, **CANARY))

    def _run(self):
        while not self._stop.is_set():
            try:
                text = self._ask()
                if text != self._expected:
                    self.wrong.append(f"other text: {text!r}")
            except (ResponseError, queue.Empty, OSError) as error:
                self.wrong.append(repr(error))
            self.num_answers += 1
            self._stop.wait(0.02)


@pytest.fixture(autouse=True)
def bystanders(server):
    """Around each test: the same processes live on, and another client got its usual text all the time."""
    pids = set(server.pids())
    canary = Canary(server.grpc_url)
    yield
    wait_until(lambda: canary.num_answers > 3)
    canary.stop()
    assert server.process.poll() is None, server.output()[-2000:]
    assert set(server.pids()) == pids, f"a process of the server ended or was restarted: {server.output()[-2000:]}"
    assert canary.wrong == []
    assert generate_http(server.http_url, "hello", max_tokens=3, end_id=-1).num_output_tokens == 3
    assert "Traceback" not in server.output()


def body_of(fields):
    """JSON by hand, so that a name may come twice."""
    return ("{" + ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in fields) + "}").encode()


def check_error(message, secrets):
    check_message(message, secrets)
    assert "the request could not be read" not in message, f"the model met an exception: {message}"


def check_status(error, secrets, check=check_error):
    assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED, "no answer"
    check(error.details(), secrets)


def check_secrets(message, secrets):
    """For what Triton itself refuses by repeating the bytes it got."""
    assert not any(secret in message for secret in secrets), message


def check_answer(answer, secrets):
    if "error" in answer:
        check_error(answer["error"], secrets)
    else:
        assert "text_output" in answer


def test_json_bodies(server, secrets):
    endings = {"ok": 0, "refused": 0}

    def send(prompt, fields, path):
        body = body_of(([("text_input", "hello"), ("max_tokens", 4)] if prompt else []) + fields)
        url = f"{server.http_url}/v2/models/faser/{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
                text, ending = answer.read().decode(), "ok"
        except urllib.error.HTTPError as error:
            with error:
                text, ending = error.read().decode(), "refused"
        endings[ending] += 1
        # Triton answers "200 and an error" where a request of generate has other than one response.
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")] or [text]
        for line in lines:
            answer = json.loads(line)
            assert ending == "ok" or "error" in answer, text
            check_answer(answer, secrets)

    num_inputs = fuzz(send, st.booleans(), json_fields, st.sampled_from(["generate", "generate_stream"]))
    assert sum(endings.values()) == num_inputs
    assert min(endings.values()) > 0, f"the inputs are all alike: {endings}"
    print(endings)


GOOD_BODY = b'{"text_input": "hello", "max_tokens": 4}'
bodies = st.one_of(
    st.binary(max_size=300),
    st.integers(0, len(GOOD_BODY)).map(lambda n: GOOD_BODY[:n]),
    st.sampled_from(
        [b"[" * 20_000, b'{"a":' * 5_000, b"{" + b'"x":1,' * 2000 + b'"x":1}', b"null", b"\xff\xfe{}", b'"\\u']
    ),
)
headers = st.lists(
    st.one_of(
        st.sampled_from(
            [
                b"Content-Type: application/json",
                b"Inference-Header-Content-Length: 999999999999",
                b"Inference-Header-Content-Length: -1",
                b"Content-Encoding: gzip",
                b"Expect: 100-continue",
                b"Accept-Encoding: deflate",
                b"triton-request-id: " + b"x" * 3000,
                b"traceparent: 00-zz",
            ]
        ),
        st.binary(max_size=40).map(lambda raw: b"X: " + raw.translate(None, b"\r\n")),
    ),
    max_size=4,
)
paths = st.one_of(
    st.sampled_from(
        [
            b"/v2/models/faser/generate",
            b"/v2/models/faser/generate_stream",
            b"/v2/models/faser/versions/9/generate",
            b"/v2/models/faser/infer",
            b"/v2/models/../../etc/passwd/generate",
            b"/v2/models/%2e%2e%2f%2e%2e/generate",
            b"/v2/models/faser/versions/-1",
            b"/v2/health/ready",
        ]
    ),
    st.binary(max_size=30).map(lambda raw: b"/v2/" + raw.translate(None, b" \r\n\0")),
)


def test_raw_http(server, secrets):
    def send(verb, path, header_lines, body, length):
        sizes = {
            "right": len(body),
            "too long": len(body) + 7,
            "too short": len(body) // 2,
            "negative": -5,
            "none": None,
        }
        lines = [verb + b" " + path + b" HTTP/1.1", b"Host: x", b"Connection: close", *header_lines]
        if sizes[length] is not None:
            lines.append(b"Content-Length: %d" % sizes[length])
        answer = b""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", server.ports[0]), timeout=1) as connection,
        ):
            connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            if length == "too long":
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                answer += part
        text = answer.decode(errors="replace")
        assert not any(secret in text for secret in secrets), text
        assert "root:" not in text

    lengths = st.sampled_from(["right", "right", "too long", "too short", "negative", "none"])
    verbs = st.sampled_from([b"POST", b"POST", b"GET", b"PUT", b"DELETE", b"BREW", b""])
    assert fuzz(send, verbs, paths, headers, bodies, lengths) > 0


shapes = st.one_of(
    *(st.just([1, 1]) for _ in range(6)),
    st.lists(st.integers(0, 6), max_size=3),
    st.sampled_from([[], [-1, 1], [1, -1], [2, 1], [1, 2**31], [2**31, 2**31], [2**62, 4], [1, 0], [0, 1]]),
)
contents = st.one_of(
    st.integers(1, 16).map(lambda number: number.to_bytes(4, "little")),
    st.floats(0.25, 1.0, width=32).map(lambda number: struct.pack("<f", number)),
    st.binary(max_size=64),
    st.sampled_from(
        [
            b"\x05\x00\x00\x00hello",
            b"\x04\x00\x00\x00",
            b"\xff\xff\xff\xffhello",
            b"\x00\x00\x00\x00",
            b"\x00\x00\xc0\x7f",
            b"\x00\x00\x80\x7f",
            b"\xff\xff\xff\x7f",
            b"\x02\x00\x00\x00\xff\xfe",
        ]
    ),
)
tensors = st.lists(
    st.tuples(
        st.one_of(
            *(st.sampled_from(sorted(DTYPES)) for _ in range(4)), st.text("abcxyz_é 😀", max_size=8)
        ),  # Triton repeats them
        st.sampled_from(["right"] * 12 + ["INT32", "BYTES", "FP64", "", "BF16", "nonsense"]),
        shapes,
        contents,
    ),
    max_size=3,
)


def request_of(prompt, drawn, parameters):
    request = service_pb2.ModelInferRequest(model_name="faser", id="fuzz")
    inputs = [("text_input", "right", [1, 1], b"\x05\x00\x00\x00hello")] if prompt else []
    for name, dtype, shape, content in inputs + drawn:
        tensor = request.inputs.add(name=name.encode("utf-8", "ignore").decode(), shape=shape)
        tensor.datatype = DTYPES.get(name, "INT32") if dtype == "right" else dtype
        request.raw_input_contents.append(content)
    for name, value in parameters:
        parameter = request.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        else:
            parameter.string_param = value
    return request


parameters = st.lists(
    st.tuples(
        st.sampled_from(["timeout", "priority", "sequence_id", "binary_data_output", "triton_x", "headers"]),
        st.one_of(st.integers(-(2**63), 2**63 - 1), st.booleans(), st.sampled_from(["", "x", "9" * 50])),
    ),
    max_size=2,
)


def test_grpc_tensors(server, secrets):
    endings = {"ok": 0, "refused": 0}
    with grpc.insecure_channel(server.grpc_url) as channel:
        stream = channel.stream_stream(
            f"{SERVICE}/ModelStreamInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelStreamInferResponse.FromString,
        )

        def send(prompt, drawn, parameters):
            try:
                for answer in stream(iter([request_of(prompt, drawn, parameters)]), timeout=30):
                    if answer.error_message:
                        endings["refused"] += 1
                        check_error(answer.error_message, secrets)
                        return
                endings["ok"] += 1
            except grpc.RpcError as error:
                endings["refused"] += 1
                check_status(error, secrets)

        fuzz(send, st.booleans(), tensors, parameters)
    assert min(endings.values()) > 0, f"the inputs are all alike: {endings}"
    print(endings)


def test_raw_grpc_bytes(server, secrets):
    good = request_of(True, [("max_tokens", "right", [1, 1], b"\x04\x00\x00\x00")], []).SerializeToString()

    def damaged(place, byte, cut):
        return (good[:place] + bytes([byte]) + good[place + 1 :])[: len(good) - cut]

    payloads = st.one_of(
        st.binary(max_size=200),
        st.builds(damaged, st.integers(0, len(good) - 1), st.integers(0, 255), st.sampled_from([0, 0, 1, 5])),
        st.integers(0, len(good)).map(lambda n: good[:n]),
    )
    with grpc.insecure_channel(server.grpc_url) as channel:

        def send(method, payload):
            try:
                if method == "ModelStreamInfer":
                    for answer in channel.stream_stream(f"{SERVICE}/{method}")(iter([payload]), timeout=30):
                        message = service_pb2.ModelStreamInferResponse.FromString(answer).error_message
                        check_secrets(message, secrets)
                else:
                    channel.unary_unary(f"{SERVICE}/{method}")(payload, timeout=30)
            except grpc.RpcError as error:
                check_status(error, secrets, check_secrets)

        assert fuzz(send, st.sampled_from([*METHODS, "ModelStreamInfer", "ModelStreamInfer"]), payloads) > 0
