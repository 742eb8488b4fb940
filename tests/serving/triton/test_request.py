"""Tensors to requests, and the models with a stand-in for EdgeApi, over an executor that is a fake."""

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.edge.local_engine import LocalEngine
from faser_trtllm.serving.text.service import TextGenerator
from faser_trtllm.serving.triton.model import TritonModel, load_model_config, note_start_error
from faser_trtllm.serving.triton.request import parse_request
from tests.serving.observe.fake_metrics import FakeMetricFamily
from tests.support.checkpoints import write_tokenizer
from tests.support.fake_engine import ENDLESS, EchoExecutor
from tests.support.waiting import PATIENCE_S, wait_until


def strings(*values):
    return np.array([[v if isinstance(v, bytes) else v.encode() for v in values]], dtype=object)


def ints(*values):
    return np.array([values], dtype=np.int32)


def floats(*values):
    return np.array([values], dtype=np.float32)


def flag(value):
    return np.array([[value]])


def parse_one(tensors):
    (part,) = parse_request(tensors)
    return part.request


def test_what_the_openai_frontend_sends():
    request = parse_one(
        {
            "text_input": strings("naïve"),
            "stream": flag(True),
            "max_tokens": ints(7),
            "stop_words": strings("a", "b"),
            "top_p": floats(0.5),
            "temperature": floats(0.25),
            "frequency_penalty": floats(0.5),
            "presence_penalty": floats(-0.5),
            "seed": np.array([[2**64 - 1]], dtype=np.uint64),
            "return_num_input_tokens": flag(True),
            "return_num_output_tokens": flag(True),
            "exclude_input_in_output": flag(True),
        }
    )
    assert (request.text, request.stream, request.max_tokens) == ("naïve", True, 7)
    assert (request.stop_words, request.top_p, request.temperature) == (("a", "b"), 0.5, 0.25)
    assert (request.frequency_penalty, request.presence_penalty, request.seed) == (0.5, -0.5, 2**64 - 1)
    assert request.exclude_input_in_output


def test_what_tensorrt_llm_clients_send_for_nothing():
    request = parse_one(
        {
            "text_input": strings("x"),
            "max_tokens": ints(5),
            "stop_words": strings(""),
            "bad_words": strings(""),
            "embedding_bias_words": strings(""),
            "embedding_bias_weights": floats(0.0),
            "beam_width": ints(1),
            "num_return_sequences": ints(1),
            "pad_id": ints(0),
            "length_penalty": floats(1.0),
            "return_log_probs": flag(False),
            "return_context_logits": flag(False),
        }
    )
    assert (request.stop_words, request.bad_words, request.embedding_bias_words) == ((), (), ())
    assert (request.stream, request.end_ids, request.num_draft_tokens) == (False, None, None)


def test_ids_and_end_ids():
    request = parse_one({"input_ids": ints(1, 2, 3), "end_id": ints(-1), "num_draft_tokens": ints(0)})
    assert (request.token_ids, request.end_ids, request.num_draft_tokens) == ((1, 2, 3), (), 0)
    assert parse_one({"input_ids": ints(1), "end_id": ints(5)}).end_ids == (5,)


def test_drafters_are_names_in_one_text():
    named = np.array([["suffix,model"]], object)
    assert parse_one({"input_ids": ints(1), "drafters": named}).drafters == "suffix,model"
    assert parse_one({"input_ids": ints(1), "drafters": np.array([[""]], object)}).drafters is None


BAD = [
    ({"max_tokens": ints(5)}, "send text_input or input_ids"),
    ({"text_input": strings("a"), "input_ids": ints(1)}, "send one of them"),
    ({"text_input": strings(b"a\xff")}, "not valid UTF-8 at byte 1"),
    ({"text_input": strings("a"), "stop_words": strings(b"\xc3")}, "stop_words is not valid UTF-8"),
    ({"text_input": strings("a", "b")}, "text_input has 2 prompts"),
    ({"text_input": strings("a"), "max_tokens": ints(1, 2)}, "max_tokens has 2 values"),
    ({"input_ids": np.zeros((2, 3), np.int32), "max_tokens": ints(1)}, "max_tokens has batch size 1"),
    ({"text_input": strings("a"), "beam_width": ints(2)}, "not supported with speculation"),
    ({"text_input": strings("a"), "num_return_sequences": ints(0)}, "num_return_sequences is 0"),
    ({"text_input": strings("a"), "num_return_sequences": ints(65)}, "num_return_sequences is 65"),
    ({"text_input": strings("a"), "stop_words": strings(*["x"] * 100_000)}, "100000 entries"),
    ({"text_input": strings("a"), "embedding_bias_weights": floats(1)}, "without embedding_bias_words"),
    ({"text_input": strings("a"), "embedding_bias_words": strings("b")}, "one weight for each word"),
    ({"text_input": strings("a"), "length_penalty": floats(float("nan"))}, "length_penalty is nan"),
]


def parse_checked(tensors):
    """What is read of tensors, and what is checked when it is submitted."""
    for part in parse_request(tensors):
        part.request.validate()


@pytest.mark.parametrize(("tensors", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_tensors_get_one_sentence(tensors, message):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_checked(tensors)
    assert message in str(caught.value)


class FakeError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL"

    def __init__(self, message, code):
        self.message, self.code = message, code


class FakeTensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


API = SimpleNamespace(
    Tensor=FakeTensor,
    TritonError=FakeError,
    MetricFamily=FakeMetricFamily,
    InferenceResponse=lambda output_tensors=(), error=None: SimpleNamespace(
        tensors={t.name(): t.as_numpy() for t in output_tensors}, error=error
    ),
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
)


class FakeRequest:
    """A request that notes whether it is touched after FINAL, when the Triton backend has forgotten it."""

    def __init__(self, request_id="", **tensors):
        self._inputs = [FakeTensor(name, array) for name, array in tensors.items()]
        self._id = request_id
        self.parameters_json = ""
        self.responses = []
        self.final = threading.Event()
        self.cancelled = False
        self.touched_after_final = False

    def inputs(self):
        return self._inputs

    def request_id(self):
        return self._id

    def parameters(self):
        self.touched_after_final |= self.final.is_set()
        return self.parameters_json

    def is_cancelled(self):
        self.touched_after_final |= self.final.is_set()
        return self.cancelled

    def get_response_sender(self):
        return self

    def send(self, response=None, flags=0):
        self.touched_after_final |= self.final.is_set()
        if response is not None:
            self.responses.append(response)
        if flags:
            self.final.set()

    def wait(self):
        assert self.final.wait(PATIENCE_S), "no final response"
        return self.responses[-1] if self.responses else None


def model_args(engine_dir, tmp_path):
    parameters = {"engine_dir": {"string_value": str(engine_dir)}}
    return {
        "model_name": "faser",
        "model_config": json.dumps({"parameters": parameters}),
        "model_repository": str(tmp_path),
        "model_version": "1",
    }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    write_tokenizer(directory, 320)
    return Tokenizer.load(directory)


@pytest.fixture
def engine(tokenizer):
    """Delivers from a thread, as the engine process does."""
    executor, due, closing = EchoExecutor(max_seq_len=2 * ENDLESS), threading.Event(), threading.Event()
    engine = LocalEngine(TextGenerator(executor, tokenizer), lambda is_urgent: due.set())

    def deliver():
        while not closing.is_set():
            due.wait()
            due.clear()
            engine.deliver()

    thread = threading.Thread(target=deliver)
    thread.start()
    executor.start()
    yield engine
    closing.set()
    due.set()
    thread.join()


@pytest.fixture
def model(engine, tmp_path):
    FakeMetricFamily.reset()
    model = TritonModel(API, model_args("unused", tmp_path), engine)
    yield model
    model.close()


def cancel(model, *requests):
    """As the engine process does when the Triton backend says that clients have cancelled."""
    for request in requests:
        request.cancelled = True
    model.end_cancelled()


def test_streamed_answer(model):
    request = FakeRequest(text_input=strings("abc"), max_tokens=ints(6), stream=flag(True))
    model.execute([request])
    final = request.wait().tensors
    assert b"".join(r.tensors["text_output"][0] for r in request.responses) == b"abcabc"
    assert sum(r.tensors["output_ids"].size for r in request.responses) == 6
    assert final["finish_reason"].tolist() == [b"length"]
    assert (final["num_input_tokens"].tolist(), final["num_output_tokens"].tolist()) == ([[3]], [[6]])
    assert final["total_draft_tokens"].tolist() == [[6]]
    assert all("finish_reason" not in r.tensors for r in request.responses[:-1])
    assert not request.touched_after_final


def test_answer_in_one_response(model):
    request = FakeRequest(
        text_input=strings("abc"),
        max_tokens=ints(6),
        return_num_input_tokens=flag(False),
        return_num_output_tokens=flag(False),
    )
    model.execute([request])
    final = request.wait().tensors
    assert len(request.responses) == 1
    assert final["text_output"].tolist() == [b"abcabcabc"]
    assert "num_input_tokens" not in final
    assert "num_output_tokens" not in final


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_cannot_be_sent_ends_its_request_with_an_error(model, monkeypatch, stream):
    """Not streamed, its first response is its last as well."""
    request = FakeRequest(text_input=strings("abc"), max_tokens=ints(ENDLESS if stream else 4), stream=flag(stream))
    send = request.send

    def fail_once(response=None, flags=0):
        monkeypatch.setattr(request, "send", send)
        raise ZeroDivisionError

    monkeypatch.setattr(request, "send", fail_once)
    model.execute([request])
    error = request.wait().error
    assert (error.code, error.message) == (
        "INTERNAL",
        "the response could not be made: ZeroDivisionError; see the server's log",
    )
    assert not request.touched_after_final


def test_bad_and_good_requests_in_one_call(model):
    requests = [
        FakeRequest(max_tokens=ints(3)),
        FakeRequest(text_input=strings("abc"), max_tokens=ints(3)),
        FakeRequest(text_input=strings("abc"), temperature=floats(float("nan"))),
        FakeRequest(request_id="x" * 1_000_000, text_input=strings("abc")),
    ]
    model.execute(requests)
    errors = [request.wait().error for request in requests]
    assert [error.code if error else None for error in errors] == [
        "INVALID_ARG",
        None,
        "INVALID_ARG",
        "INVALID_ARG",
    ]
    assert errors[3].message == "the request id has 1000000 bytes, allowed are at most 4096"
    assert all(len(request.responses) == 1 for request in requests)


def test_a_client_that_asks_for_it_gets_the_code_in_the_sentence(model):
    requests = [FakeRequest(text_input=strings("a"), max_tokens=ints(n), stream=flag(True)) for n in (0, ENDLESS)]
    for request in requests:
        request.parameters_json = '{"error_codes":true}'
    model.execute(requests)
    refused, running = requests
    assert refused.wait().error.message.startswith("[INVALID_ARG] max_tokens is 0")
    wait_until(lambda: running.responses)
    cancel(model, running)
    error = running.wait().error
    assert (error.code, error.message) == ("CANCELLED", "[CANCELLED] the request was cancelled")
    assert not refused.touched_after_final
    assert not running.touched_after_final


def test_equal_request_ids_are_independent(model):
    requests = [FakeRequest("same", text_input=strings(text), max_tokens=ints(4)) for text in ("ab", "xy")]
    model.execute(requests)
    assert [r.wait().tensors["text_output"][0] for r in requests] == [b"ababab", b"xyxyxy"]


def test_a_batch_of_sequences_ends_with_its_last(model):
    request = FakeRequest(
        text_input=np.array([[b"ab"], [b"xy"]], dtype=object),
        max_tokens=np.array([[4], [9]], dtype=np.int32),
        num_return_sequences=np.array([[2], [1]], dtype=np.int32),
        stream=np.array([[True], [True]]),
    )
    model.execute([request])
    request.wait()
    texts = {}
    for response in request.responses:
        tensors = response.tensors
        where = int(tensors["batch_index"][0, 0]), int(tensors["sequence_index"][0, 0])
        texts[where] = texts.get(where, b"") + tensors["text_output"][0]
    assert texts == {(0, 0): b"abab", (0, 1): b"abab", (1, 0): b"xyxyxyxyx"}
    assert sum("finish_reason" in response.tensors for response in request.responses) == 3
    assert not request.touched_after_final


def test_a_part_that_is_refused_ends_the_others(model, engine, monkeypatch):
    submit = engine.submit
    ids = []

    def submit_two(request, on_event):
        if len(ids) == 2:
            raise UnavailableError("no room")
        ids.append(submit(request, on_event))
        return ids[-1]

    monkeypatch.setattr(engine, "submit", submit_two)
    request = FakeRequest(text_input=strings("abc"), max_tokens=ints(ENDLESS), num_return_sequences=ints(3))
    model.execute([request])
    assert request.wait().error.message == "no room"
    wait_until(lambda: engine.num_open == 0)
    assert len(request.responses) == 1
    assert not request.touched_after_final


def test_a_stop_request_ends_all_of_its_id_with_what_they_have(model):
    requests = [FakeRequest(name, text_input=strings("abc"), max_tokens=ints(ENDLESS)) for name in ("a", "b", "a")]
    model.execute(requests)
    time.sleep(0.1)
    stop = FakeRequest("a", text_input=strings(""), stop=flag(True))
    model.execute([stop])
    assert stop.wait() is None
    for request in (requests[0], requests[2]):
        final = request.wait().tensors
        assert final["finish_reason"].tolist() == [b"cancelled"]
        assert final["text_output"][0] == b"abc" + (b"abc" * ENDLESS)[: final["num_output_tokens"][0, 0]]
    assert not requests[1].final.is_set()
    cancel(model, requests[1])
    assert requests[1].wait().error.code == "CANCELLED"


def test_cancelled_requests_end_and_are_left_alone(model):
    requests = [FakeRequest(text_input=strings("abc"), max_tokens=ints(ENDLESS), stream=flag(True)) for _ in range(50)]
    model.execute(requests)
    time.sleep(0.1)
    cancel(model, *requests)
    assert {request.wait().error.code for request in requests} == {"CANCELLED"}
    time.sleep(0.05)
    assert not any(request.touched_after_final for request in requests)


def test_metrics_come_from_one_thread(model):
    requests = [FakeRequest(text_input=strings("abc"), max_tokens=ints(5)) for _ in range(10)]
    requests.append(FakeRequest(text_input=strings("abc"), max_tokens=ints(0)))
    for request in requests:
        model.execute([request])
    for request in requests:
        request.wait()
    model.close()
    assert FakeMetricFamily.threads == {"faser-metrics"}
    assert FakeMetricFamily.values["faser_request_success_total", ("finished_reason", "length")] == 10
    assert FakeMetricFamily.values["faser_request_failures_total", ("code", "INVALID_ARG")] == 1


def test_close_joins_its_thread(engine, tmp_path):
    model = TritonModel(API, model_args("unused", tmp_path), engine)
    assert "faser-metrics" in {thread.name for thread in threading.enumerate()}
    model.close()
    assert "faser-metrics" not in {thread.name for thread in threading.enumerate()}


def test_a_missing_engine_dir_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.delenv("FASER_ENGINE_DIR", raising=False)
    monkeypatch.delenv("FASER_CONFIG", raising=False)
    with pytest.raises(InvalidArgumentError, match="engine_dir is not set"):
        load_model_config(model_args("", tmp_path))


def test_the_reason_of_a_failed_start_is_left_to_the_launcher_if_there_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("FASER_RUN_DIR", raising=False)
    note_start_error("nobody reads it")
    monkeypatch.setenv("FASER_RUN_DIR", str(tmp_path))
    note_start_error("what was wrong")
    assert (tmp_path / "startup_error").read_text() == "what was wrong"


def test_environment_wins_over_file_and_parameters(tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "faser.yaml").write_text("engine_dir: nowhere\ncancellation_check_period_ms: 1\n")
    monkeypatch.delenv("FASER_CONFIG", raising=False)
    monkeypatch.setenv("FASER_ENGINE_DIR", "here")
    config = load_model_config(model_args("elsewhere", tmp_path))
    assert (config.engine_dir, config.cancellation_check_period_ms) == ("here", 1)
