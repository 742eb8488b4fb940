"""The engine process, spoken to as the Triton backend does."""

import signal
import struct

import numpy as np
import pytest

from faser_trtllm.serving.edge import wire
from faser_trtllm.serving.edge.wire import FromEdge, OpenStatus, ToEdge
from faser_trtllm.serving.text.backlog import MAX_AT_ONCE
from tests.support.checkpoints import write_tokenizer
from tests.support.edge_peer import Edge
from tests.support.fake_engine import ENDLESS


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_word_ends_each_of_many_requests(edge, stream):
    """More than are looked at on the executor's thread."""
    number = 3 * MAX_AT_ONCE
    fields = {"stream": np.array([[stream]]), "exclude_input_in_output": np.array([[True]])}
    for handle in range(number):
        edge.ask(0, handle, text_input=b"abcdefg", max_tokens=ints(ENDLESS), stop_words=b"fgab", **fields)
    answers = edge.answers(number)
    assert {text_of(answers[handle]) for handle in range(number)} == {b"abcde"}
    reasons = [outputs["finish_reason"][2][4:] for handle in range(number) for outputs in answers[handle][-1:]]
    assert reasons == [b"stop"] * number


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


def test_a_model_that_is_not_open_is_refused_and_the_others_are_served(edge, tmp_path):
    """As after a restart of the process, where a model's own configuration may have been edited meanwhile."""
    edge.open(1, "tensorrt_llm_bls", engine_dir=tmp_path)
    assert edge.opened()[:2] == (1, OpenStatus.OTHER_CONFIGURATION)
    edge.ask(1, 1, True, text_input=b"abc", max_tokens=ints(4))
    edge.ask(0, 2, text_input=b"abc", max_tokens=ints(4))
    answers = edge.answers(2)
    ((code, message),) = answers[1]
    assert code == wire.ERROR_CODES["UNAVAILABLE"]
    assert message.startswith("[UNAVAILABLE] the model did not open when the engine process started again: its config")
    assert text_of(answers[2]) == b"abcabca"


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
