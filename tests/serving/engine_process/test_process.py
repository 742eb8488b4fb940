"""The engine process, spoken to as the Triton backend does."""

import contextlib
import json
import re
import signal
import struct
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from faser_trtllm import __version__
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.outbox import MAX_AT_ONCE
from faser_trtllm.serving.engine_process.wire import FromBackend, OpenStatus, ToBackend
from tests.support.backend_frames import Refusal, texts_array
from tests.support.backend_peer import Backend
from tests.support.fake_engine import ENDLESS
from tests.support.triton_server import ROOT


@contextlib.contextmanager
def opened(fake_engine_dir):
    with Backend(fake_engine_dir) as backend:
        backend.hello()
        backend.open(0)
        assert backend.opened() == (0, OpenStatus.OPENED, 0, "")
        yield backend


@pytest.fixture
def backend(fake_engine_dir):
    with opened(fake_engine_dir) as backend:
        yield backend


@pytest.fixture(scope="module")
def shared(fake_engine_dir):
    """For tests that end all their requests and open no model."""
    with opened(fake_engine_dir) as backend:
        yield backend


def ints(value):
    return np.array([[value]], np.int32)


def text_of(answers):
    return b"".join(outputs["text_output"][2][4:] for outputs in answers)


def test_answers_have_the_outputs_that_were_asked_for(shared):
    stream = np.array([[True]])
    shared.ask(0, 7, text_input=b"abc", max_tokens=ints(6), stream=stream)
    shared.ask(0, 8, text_input=b"abc", max_tokens=ints(3), outputs=("output_ids",))
    answers = shared.answers(2)
    assert text_of(answers[7]) == b"abcabc"
    assert [set(outputs) for outputs in answers[8]] == [{"output_ids"}]
    assert answers[8][0]["output_ids"][1] == (1, 1, 3)
    assert set(answers[7][-1]) == {"text_output", "finish_reason"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_word_ends_each_of_many_requests(shared, stream):
    """More than are looked at on the executor's thread."""
    number = 3 * MAX_AT_ONCE
    fields = {"stream": np.array([[stream]]), "exclude_input_in_output": np.array([[True]])}
    for handle in range(number):
        shared.ask(0, handle, text_input=b"abcdefg", max_tokens=ints(ENDLESS), stop_words=b"fgab", **fields)
    answers = shared.answers(number)
    assert {text_of(answers[handle]) for handle in range(number)} == {b"abcde"}
    reasons = [outputs["finish_reason"][2][4:] for handle in range(number) for outputs in answers[handle][-1:]]
    assert reasons == [b"stop"] * number


def test_a_request_arrives_when_its_frame_does(shared):
    """The second one runs while the first one's guide is compiled."""
    schema = {"type": "object", "properties": {f"k{i}": {"enum": [f"{i}_{j}" for j in range(40)]} for i in range(40)}}
    guide = {"guided_decoding_guide_type": b"json_schema", "guided_decoding_guide": json.dumps(schema).encode()}
    sent_ns = time.perf_counter_ns()
    for handle, fields in ((1, guide), (2, {})):
        fields |= {"text_input": b"abc", "max_tokens": ints(3), "return_perf_metrics": np.array([[True]])}
        shared.ask(0, handle, outputs=("arrival_time_ns",), **fields)
    answers = shared.answers(2)
    first_ns, second_ns = (np.frombuffer(answers[handle][-1]["arrival_time_ns"][2], np.int64)[0] for handle in (1, 2))
    assert sent_ns <= first_ns < second_ns


def test_a_bad_request_gets_its_sentence_and_what_it_is_about(backend):
    backend.ask(0, 1, text_input=b"abc", max_tokens=ints(-1))
    sentence = "max_tokens is -1, allowed is 1 or more"
    assert backend.answers(1)[1] == [
        Refusal(wire.ERROR_CODES["INVALID_ARG"], sentence, "max_tokens", "-1", "1 or more")
    ]
    backend.open(1, "tensorrt_llm")
    assert backend.opened()[:2] == (1, OpenStatus.OPENED)
    inputs = {"input_ids": ints(65), "input_lengths": ints(1), "request_output_len": ints(-1)}
    backend.ask(1, 2, outputs=("output_ids",), **inputs)
    sentence = "request_output_len is -1, allowed is 1 or more"
    assert backend.answers(1)[2] == [
        Refusal(wire.ERROR_CODES["INVALID_ARG"], sentence, "request_output_len", "-1", "1 or more")
    ], "each model's clients read their own name"


def test_good_requests_are_served_next_to_bad_ones_and_ids_need_not_differ(shared):
    for handle, text in ((1, b"ab"), (2, b"xy")):
        shared.ask(0, handle, text_input=text, max_tokens=ints(4))
    shared.ask(0, 3, request_id="x" * 5000, text_input=b"abc")
    shared.ask(0, 4, max_tokens=ints(3))
    answers = shared.answers(4)
    assert [text_of(answers[handle]) for handle in (1, 2)] == [b"ababab", b"xyxyxy"], "prompt and output"
    assert answers[3][0].message == "the request id has 5000 bytes, allowed are at most 4096"
    assert answers[4][0].message == "the prompt is missing, send text_input or input_ids"


def test_the_sequences_of_a_request_share_the_limit_of_logits(shared):
    inputs = {"text_input": b"abc", "return_generation_logits": np.array([[True]]), "max_tokens": ints(1000)}
    shared.ask(0, 1, num_return_sequences=ints(27), **inputs)
    (error,) = shared.answers(1)[1]
    assert error.message == (
        "return_generation_logits with max_tokens 1000 and 27 sequences needs 34560000 bytes, allowed are 33554432; "
        "lower max_tokens to 970"
    )


def test_a_stream_that_sends_all_log_probs_again_and_again_is_bounded(backend):
    """Only TensorRT-LLM's models send all log probs so far with each response; 100,000 tokens would be 20 GB."""
    backend.open(1, "ensemble")
    assert backend.opened()[:2] == (1, OpenStatus.OPENED)
    yes = np.array([[True]])
    inputs = {"text_input": b"abc", "return_log_probs": yes, "max_tokens": ints(8193)}
    backend.ask(1, 1, stream=yes, **inputs)
    (error,) = backend.answers(1)[1]
    assert error.message == (
        "return_log_probs with stream and 8193 output tokens sends the log probs of all tokens with each token, "
        "allowed are 8192 tokens; lower max_tokens, or use the model faser, which only sends new ones"
    )
    for handle, model, more in (
        (2, 0, {"stream": yes}),
        (3, 1, {}),
        (4, 1, {"stream": yes, "max_tokens": ints(8192)}),
        (5, 1, {"stream": yes, "return_log_probs": ~yes}),
    ):
        backend.ask(model, handle, **inputs | more)
        backend.send(FromBackend.CANCEL, struct.pack("<Q", handle))
        assert backend.answers(1)[handle][-1].code == wire.ERROR_CODES["CANCELLED"]


def test_a_batch_of_sequences_ends_with_its_last(shared):
    shared.ask(
        0,
        1,
        outputs=("text_output", "batch_index", "sequence_index", "finish_reason"),
        text_input=texts_array([[b"ab"], [b"xy"]]),
        max_tokens=np.array([[4], [9]], np.int32),
        num_return_sequences=np.array([[2], [1]], np.int32),
        stream=np.array([[True], [True]]),
    )
    texts, num_ends = {}, 0
    for outputs in shared.answers(1)[1]:
        where = tuple(struct.unpack("<i", outputs[name][2])[0] for name in ("batch_index", "sequence_index"))
        texts[where] = texts.get(where, b"") + outputs["text_output"][2][4:]
        num_ends += "finish_reason" in outputs
    assert texts == {(0, 0): b"abab", (0, 1): b"abab", (1, 0): b"xyxyxyxyx"}
    assert num_ends == 3


def test_a_sequence_that_is_refused_ends_the_others(fake_engine_dir, monkeypatch):
    monkeypatch.setenv("FASER_FAKE_MAX_REQUESTS", "2")
    with Backend(fake_engine_dir) as backend:
        backend.hello()
        backend.open(0)
        assert backend.opened()[1] is OpenStatus.OPENED
        backend.ask(0, 1, text_input=b"abc", max_tokens=ints(ENDLESS), num_return_sequences=ints(3))
        assert backend.answers(1)[1] == [Refusal(wire.ERROR_CODES["UNAVAILABLE"], "no room")]
        backend.ask(0, 2, text_input=b"abc", max_tokens=ints(3))
        assert text_of(backend.answers(1)[2]) == b"abcabc", "the two that ran have left"


def test_a_stop_request_ends_all_of_its_id_with_what_they_have(shared):
    own, other = str(uuid.uuid4()), uuid.uuid4().hex
    for handle, request_id in ((1, own), (2, other), (3, own)):
        stream = np.array([[True]])
        shared.ask(0, handle, request_id=request_id, text_input=b"abc", max_tokens=ints(ENDLESS), stream=stream)
    shared.receive(ToBackend.RESPONSES)
    shared.ask(0, 4, request_id=own, text_input=b"", stop=np.array([[True]]))
    answers = shared.answers(3)
    assert answers[4] == [{}], "the flag alone"
    for handle in (1, 3):
        assert answers[handle][-1]["finish_reason"][2][4:] == b"cancelled"
    assert all("finish_reason" not in outputs for outputs in answers.get(2, ()))
    shared.send(FromBackend.CANCEL, struct.pack("<Q", 2))
    assert shared.answers(1)[2][-1].message == "the request was cancelled"
    shared.ask(0, 5, request_id="", text_input=b"", stop=np.array([[True]]))
    assert "A request id must be provided" in shared.answers(1)[5][0].message


def test_a_stop_reaches_a_request_that_is_still_to_be_read(shared):
    """Large requests are read on threads, whatever the size of the stop that follows them."""
    rng = np.random.default_rng(0)
    for handle in range(1, 13, 2):
        own, stream = str(uuid.uuid4()), np.array([[True]])
        prediction = rng.integers(97, 123, 60_000, np.uint8).tobytes()
        asked = {"text_input": b"abc", "max_tokens": ints(ENDLESS), "stream": stream, "prediction": prediction}
        shared.ask(0, handle, request_id=own, **asked)
        text = b"a" * 10 ** (handle % 5)
        shared.ask(0, handle + 1, request_id=own, text_input=text, stop=np.array([[True]]))
        answers = shared.answers(2)
        assert answers[handle + 1] == [{}]
        assert answers[handle][-1]["finish_reason"][2][4:] == b"cancelled"


def test_many_cancelled_requests_end_once(shared):
    for handle in range(50):
        shared.ask(0, handle, text_input=b"abc", max_tokens=ints(ENDLESS), stream=np.array([[True]]))
    shared.receive(ToBackend.RESPONSES)
    for handle in range(50):
        shared.send(FromBackend.CANCEL, struct.pack("<Q", handle))
    assert {answers[-1].code for answers in shared.answers(50).values()} == {wire.ERROR_CODES["CANCELLED"]}
    shared.ask(0, 50, text_input=b"abc", max_tokens=ints(3))
    assert text_of(shared.answers(1)[50]) == b"abcabc"


def test_a_cancelled_request_ends(shared):
    shared.ask(0, 1, text_input=b"abc", max_tokens=ints(ENDLESS))
    shared.send(FromBackend.CANCEL, struct.pack("<Q", 1))
    shared.send(FromBackend.CANCEL, struct.pack("<Q", 99))  # may have ended already
    assert shared.answers(1)[1][-1] == Refusal(wire.ERROR_CODES["CANCELLED"], "the request was cancelled")


def test_models_share_the_engine_unless_their_configuration_is_another(backend, tmp_path):
    backend.open(1, "tensorrt_llm")
    assert backend.opened()[:2] == (1, OpenStatus.OPENED)
    backend.open(2, engine_dir=tmp_path)
    assert backend.opened()[:2] == (2, OpenStatus.OTHER_CONFIGURATION)
    backend.send(FromBackend.CLOSE, struct.pack("<I", 0))
    ids = np.array([[65, 66]], np.int32)
    inputs = {"input_ids": ids, "input_lengths": ints(2), "request_output_len": ints(4)}
    backend.ask(1, 5, outputs=("output_ids",), **inputs)
    ((outputs,),) = backend.answers(1).values()
    assert struct.unpack("<6i", outputs["output_ids"][2]) == (65, 66, 65, 66, 65, 66)


def test_a_model_that_is_not_open_is_refused_and_the_others_are_served(backend, tmp_path):
    """After a restart of the process a model's own configuration may have been edited."""
    backend.open(1, "tensorrt_llm_bls", engine_dir=tmp_path)
    assert backend.opened()[:2] == (1, OpenStatus.OTHER_CONFIGURATION)
    backend.ask(1, 1, text_input=b"abc", max_tokens=ints(4))
    backend.ask(0, 2, text_input=b"abc", max_tokens=ints(4))
    answers = backend.answers(2)
    (error,) = answers[1]
    assert error.code == wire.ERROR_CODES["UNAVAILABLE"]
    assert error.message.startswith("the model did not open when the engine process started again: its config")
    assert text_of(answers[2]) == b"abcabca"


def test_a_ping_is_answered_with_progress(backend):
    backend.send(FromBackend.PING)
    stalled_s, slow_step_s = struct.unpack("<2d", backend.receive(ToBackend.PONG))
    assert (stalled_s, slow_step_s) == (0.0, 0.0)


def test_an_engine_that_cannot_be_opened_says_why_and_ends(tmp_path):
    with Backend(tmp_path / "gone", run_dir=tmp_path) as backend:
        backend.hello()
        backend.open(3)
        model, status, _, message = backend.opened()
        assert (model, status) == (3, OpenStatus.FAILED)
        assert message.startswith("tokenizer.json is missing")
        assert (tmp_path / "startup_error").read_text() == message
        assert backend.closed() == 1


@pytest.mark.parametrize(("release", "named"), [("0.0.9", "0.0.9"), (None, "an older release")])
def test_a_backend_of_another_release_is_refused(fake_engine_dir, tmp_path, release, named):
    with Backend(fake_engine_dir, run_dir=tmp_path) as backend:
        backend.hello(release=release)
        backend.open(0)
        model, status, _, message = backend.opened()
        assert (model, status) == (0, OpenStatus.FAILED)
        expected = f"the Triton backend is of faser_trtllm {named}, the package of {__version__}; "
        assert message == f"{expected}install both from the same release"
        assert (tmp_path / "startup_error").read_text() == message


def test_the_backend_s_source_names_the_package_s_release():
    (release,) = re.findall(r'kRelease = "(.+)"', (ROOT / "plugins" / "triton" / "wire.h").read_text())
    assert release == __version__
    assert f'\nversion = "{release}"\n' in (ROOT / "pyproject.toml").read_text()


def test_the_first_guide_finds_its_library_ready(backend):
    """To open the tokenizer for guides holds Python's lock for up to a second, for all requests."""
    assert "llguidance" in Path(f"/proc/{backend.process.pid}/maps").read_text()


def test_a_drain_lets_requests_finish_and_refuses_new_ones(fake_engine_dir, tmp_path):
    config = tmp_path / "faser.yaml"
    config.write_text("drain_timeout_s: 1\n")
    with Backend(fake_engine_dir, str(config)) as backend:
        backend.hello()
        backend.open(0)
        assert backend.opened()[1] is OpenStatus.OPENED
        backend.ask(0, 1, text_input=b"abc", max_tokens=ints(ENDLESS), stream=np.array([[True]]))
        backend.receive(ToBackend.RESPONSES)  # it runs
        backend.process.send_signal(signal.SIGTERM)
        backend.receive(ToBackend.DRAINING)
        backend.ask(0, 2, text_input=b"abc", max_tokens=ints(2))
        answers = backend.answers(2)
        shutting_down = "the server is shutting down; send the request to another one"
        assert answers[2] == [Refusal(wire.ERROR_CODES["UNAVAILABLE"], shutting_down)]
        assert answers[1][-1] == Refusal(wire.ERROR_CODES["UNAVAILABLE"], shutting_down)
        assert b"abc" in text_of(answers[1][:-1])
        assert backend.closed() == 0


def test_what_is_not_a_frame_ends_the_process(backend):
    backend.send(99)
    assert backend.closed() == 70


def test_the_end_of_the_socket_ends_the_process(backend):
    backend.hang_up()
    assert backend.closed() == 0
