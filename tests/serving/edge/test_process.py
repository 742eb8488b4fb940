"""The engine process, spoken to as the Triton backend does."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys

import numpy as np
import pytest

from faser_trtllm.serving.edge import wire
from faser_trtllm.serving.edge.wire import FromEdge, OpenStatus, ToEdge
from tests.serving.edge.frames import packed, packed_text, read_frame, read_responses, request_body, texts_array
from tests.support.checkpoints import write_tokenizer
from tests.support.fake_engine import ENDLESS
from tests.support.waiting import PATIENCE_S


class Edge:
    """The other end of an engine process's socket."""

    def __init__(self, engine_dir, config="", run_dir=None):
        self._config = config
        self._engine_dir = engine_dir
        ours, theirs = socket.socketpair()
        self._sock = ours
        ours.settimeout(PATIENCE_S)
        command = [sys.executable, "-m", "tests.support.fake_engine", f"--edge_fd={theirs.fileno()}"]
        environment = {k: v for k, v in os.environ.items() if k not in ("FASER_CONFIG", "FASER_ENGINE_DIR")}
        if run_dir is not None:
            environment["FASER_RUN_DIR"] = str(run_dir)
        with theirs:
            self.process = subprocess.Popen(
                [*command, f"--parent_pid={os.getpid()}"], pass_fds=[theirs.fileno()], env=environment
            )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._sock.close()
        self.process.kill()
        self.process.wait()

    def send(self, kind, content=b""):
        self._sock.sendall(packed(kind, content))

    def hello(self, version=wire.VERSION):
        self.send(FromEdge.HELLO, struct.pack("<II", version, 0))

    def open(self, model, name="faser", engine_dir=None):
        parameters = {"engine_dir": {"string_value": str(engine_dir or self._engine_dir)}}
        parameters["config"] = {"string_value": self._config}
        config = json.dumps({"parameters": parameters})
        texts = b"".join(map(packed_text, (name, "1", "/nowhere", config)))
        self.send(FromEdge.OPEN, struct.pack("<I", model) + texts)

    def ask(self, model, handle, wants_code=False, outputs=("text_output", "finish_reason"), **inputs):
        arrays = [
            (name, texts_array([[value]]) if isinstance(value, bytes) else value) for name, value in inputs.items()
        ]
        self.send(FromEdge.REQUEST, request_body(model, handle, wants_code, "id", outputs, arrays))

    def receive(self, kind):
        """The body of the next frame of this kind; those of other kinds are passed over."""
        while True:
            found, body = read_frame(self._sock)
            if found is kind:
                return body

    def opened(self):
        body = self.receive(ToEdge.OPENED)
        model, status, code = struct.unpack_from("<IBB", body)
        return model, OpenStatus(status), code, body[10:].decode()

    def answers(self, number):
        """All responses of so many requests, by handle."""
        found, num_ended = {}, 0
        while num_ended < number:
            for handle, is_final, outputs, error in read_responses(self.receive(ToEdge.RESPONSES)):
                found.setdefault(handle, []).append(error or outputs)
                num_ended += is_final
        return found

    def hang_up(self):
        self._sock.shutdown(socket.SHUT_WR)

    def closed(self):
        """The exit status."""
        while self._sock.recv(1 << 16):
            pass
        return self.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    write_tokenizer(directory, 320)
    return directory


@pytest.fixture
def edge(engine_dir):
    with Edge(engine_dir) as edge:
        edge.hello()
        edge.open(0)
        assert edge.opened() == (0, OpenStatus.OPENED, 0, "")
        yield edge


def ints(value):
    return np.array([[value]], np.int32)


def text_of(answers):
    return b"".join(outputs["text_output"][2][4:] for outputs in answers)


def test_answers_have_the_outputs_that_were_asked_for(edge):
    stream = np.array([[True]])
    edge.ask(0, 7, text_input=b"abc", max_tokens=ints(6), stream=stream)
    edge.ask(0, 8, text_input=b"abc", max_tokens=ints(3), outputs=("output_ids",))
    answers = edge.answers(2)
    assert text_of(answers[7]) == b"abcabc"
    assert [set(outputs) for outputs in answers[8]] == [{"output_ids"}]
    assert answers[8][0]["output_ids"][1] == (1, 1, 3)
    assert set(answers[7][-1]) == {"text_output", "finish_reason"}


@pytest.mark.parametrize(("wants_code", "prefix"), [(False, ""), (True, "[INVALID_ARG] ")])
def test_a_bad_request_gets_its_sentence(edge, wants_code, prefix):
    edge.ask(0, 1, wants_code, text_input=b"abc", max_tokens=ints(-1))
    (error,) = edge.answers(1)[1]
    assert error == (wire.ERROR_CODES["INVALID_ARG"], f"{prefix}max_tokens is -1, allowed is 1 or more")


def test_a_cancelled_request_ends(edge):
    edge.ask(0, 1, text_input=b"abc", max_tokens=ints(ENDLESS))
    edge.send(FromEdge.CANCEL, struct.pack("<Q", 1))
    edge.send(FromEdge.CANCEL, struct.pack("<Q", 99))  # may have ended already
    assert edge.answers(1)[1][-1] == (wire.ERROR_CODES["CANCELLED"], "the request was cancelled")


def test_models_share_the_engine_unless_their_configuration_is_another(edge, tmp_path):
    edge.open(1, "tensorrt_llm")
    assert edge.opened()[:2] == (1, OpenStatus.OPENED)
    edge.open(2, engine_dir=tmp_path)
    assert edge.opened()[:2] == (2, OpenStatus.OTHER_CONFIGURATION)
    edge.send(FromEdge.CLOSE, struct.pack("<I", 0))
    ids = np.array([[65, 66]], np.int32)
    inputs = {"input_ids": ids, "input_lengths": ints(2), "request_output_len": ints(4)}
    edge.ask(1, 5, outputs=("output_ids",), **inputs)
    ((outputs,),) = edge.answers(1).values()
    assert struct.unpack("<6i", outputs["output_ids"][2]) == (65, 66, 65, 66, 65, 66)


def test_a_ping_is_answered_with_progress(edge):
    edge.send(FromEdge.PING)
    stalled_s, slow_step_s = struct.unpack("<2d", edge.receive(ToEdge.PONG))
    assert (stalled_s, slow_step_s) == (0.0, 0.0)


def test_text_and_tokens_are_models_of_their_own(engine_dir):
    """Alone as well: an engine process that says nothing would count as hung."""
    with Edge(engine_dir) as edge:
        edge.hello()
        edge.open(0, "preprocessing")
        edge.open(1, "postprocessing")
        assert [edge.opened()[:2] for _ in range(2)] == [(0, OpenStatus.OPENED), (1, OpenStatus.OPENED)]
        edge.send(FromEdge.PING)
        edge.receive(ToEdge.PONG)
        edge.ask(0, 1, outputs=("INPUT_ID", "EMBEDDING_BIAS"), QUERY=b"abc", REQUEST_OUTPUT_LEN=ints(5))
        (outputs,) = edge.answers(1)[1]
        assert outputs["EMBEDDING_BIAS"][1:] == ((1, 0), b"")
        _, (_, length), ids = outputs["INPUT_ID"]
        ids = np.frombuffer(ids, np.int32).reshape(1, 1, length)
        edge.ask(1, 2, outputs=("OUTPUT",), TOKENS_BATCH=ids, SEQUENCE_LENGTH=ints(length))
        ((outputs,),) = edge.answers(1).values()
        assert outputs["OUTPUT"][2][4:] == b"abc"
        edge.ask(0, 3, True, REQUEST_OUTPUT_LEN=ints(5))
        assert edge.answers(1)[3] == [(wire.ERROR_CODES["INVALID_ARG"], "[INVALID_ARG] QUERY is missing; send it")]
        edge.send(FromEdge.CLOSE, struct.pack("<I", 0))
        edge.send(FromEdge.PING)
        edge.receive(ToEdge.PONG)


def test_an_engine_that_cannot_be_opened_says_why_and_ends(tmp_path):
    with Edge(tmp_path / "gone", run_dir=tmp_path) as edge:
        edge.hello()
        edge.open(3)
        model, status, _, message = edge.opened()
        assert (model, status) == (3, OpenStatus.FAILED)
        assert message.startswith("tokenizer.json is missing")
        assert (tmp_path / "startup_error").read_text() == message
        assert edge.closed() == 1


def test_a_drain_lets_requests_finish_and_refuses_new_ones(engine_dir, tmp_path):
    config = tmp_path / "faser.yaml"
    config.write_text("drain_timeout_s: 1\n")
    with Edge(engine_dir, str(config)) as edge:
        edge.hello()
        edge.open(0)
        assert edge.opened()[1] is OpenStatus.OPENED
        edge.ask(0, 1, text_input=b"abc", max_tokens=ints(ENDLESS), stream=np.array([[True]]))
        edge.receive(ToEdge.RESPONSES)  # it runs
        edge.process.send_signal(signal.SIGTERM)
        edge.receive(ToEdge.DRAINING)
        edge.ask(0, 2, text_input=b"abc", max_tokens=ints(2))
        answers = edge.answers(2)
        shutting_down = "the server is shutting down; send the request to another one"
        assert answers[2] == [(wire.ERROR_CODES["UNAVAILABLE"], shutting_down)]
        assert answers[1][-1] == (wire.ERROR_CODES["UNAVAILABLE"], shutting_down)
        assert b"abc" in text_of(answers[1][:-1])
        assert edge.closed() == 0


def test_what_is_not_a_frame_ends_the_process(edge):
    edge.send(99)
    assert edge.closed() == 70


def test_the_end_of_the_socket_ends_the_process(edge):
    edge.hang_up()
    assert edge.closed() == 0
