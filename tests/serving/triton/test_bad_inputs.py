"""Bad input, case by case, to a real server over real engines: what Triton refuses, what we refuse, and what works.

tests/serving/reliability/inputs.py has the cases' numbers, and the tests elsewhere that answer the others.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.client import INPUT_DTYPES, GrpcClient, ResponseError, generate_http
from tests.support.checkpoints import END_OF_TEXT
from tests.support.engine_dirs import make_engine_dir
from tests.support.triton_server import Server

pytestmark = [pytest.mark.triton, pytest.mark.slow]

MAX_SEQ_LEN = 256
METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    sizes = {"max_batch_size": 16, "max_seq_len": MAX_SEQ_LEN, "max_draft_len": 4, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), **sizes)


@pytest.fixture(scope="module")
def server(engine_dir, tmp_path_factory):
    with Server(engine_dir, speculation="fixed:4", log=tmp_path_factory.mktemp("log") / "log") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def tokenizer(engine_dir):
    return Tokenizer.load(engine_dir)


@pytest.fixture(autouse=True)
def survival(server):
    """Around each test: the same processes, and a good request is served."""
    pids = set(server.pids())
    yield
    assert set(server.pids()) == pids, server.output()[-2000:]
    assert generate_http(server.http_url, "hello", max_tokens=3, end_id=-1).num_output_tokens == 3


def raw(name, dtype, shape, content):
    """A tensor as bytes, right or wrong."""
    return name, dtype, shape, content


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return raw("text_input", "BYTES", [1, 1], len(data).to_bytes(4, "little") + data)


def int32(name, *values):
    return raw(name, "INT32", [1, len(values)], np.array(values, "<i4").tobytes())


def send(server, *tensors, request_id="", model="faser", version=""):
    """The error of a stream with this one request, None if it is served."""
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    for name, dtype, shape, content in tensors:
        request.inputs.add(name=name, datatype=dtype, shape=shape)
        request.raw_input_contents.append(content)
    with grpc.insecure_channel(server.grpc_url) as channel:
        stream = channel.stream_stream(
            METHOD, service_pb2.ModelInferRequest.SerializeToString, service_pb2.ModelStreamInferResponse.FromString
        )
        try:
            errors = [answer.error_message for answer in stream(iter([request]), timeout=30)]
        except grpc.RpcError as error:
            return error.details()
    return next((error for error in errors if error), None)


TENSORS = {
    "1 INT64 for INT32": (
        [text("a"), raw("max_tokens", "INT64", [1, 1], bytes(8))],
        "'max_tokens' data-type is 'INT64', but model 'faser' expects 'INT32'",
    ),
    "1 FP32 for BYTES": (
        [raw("text_input", "FP32", [1, 1], bytes(4))],
        "'text_input' data-type is 'FP32', but model 'faser' expects 'BYTES'",
    ),
    "2 no batch dimension": ([raw("text_input", "BYTES", [2], text("a")[3] * 2)], "unexpected shape"),
    "2 content too short": ([text("a"), raw("max_tokens", "INT32", [1, 1], bytes(2))], "max_tokens"),
    "3 unknown input": ([text("a"), int32("max_token", 4)], "unexpected inference input 'max_token'"),
    "4 duplicate input": ([text("a"), int32("max_tokens", 4), int32("max_tokens", 5)], "max_tokens"),
    "5 the prompt is missing": ([int32("max_tokens", 4)], "the prompt is missing, send text_input or input_ids"),
    "5 no input at all": ([], "input"),
    "18 invalid UTF-8": ([text(b"ab\xc3\x28")], "text_input is not valid UTF-8 at byte 2; send text encoded as UTF-8"),
    "23 a tensor of ids that is empty": ([raw("input_ids", "INT32", [1, 0], b"")], "the prompt is empty"),
    "28 prompts and limits that do not go together": (
        [raw("text_input", "BYTES", [2, 1], text("a")[3] * 2), int32("max_tokens", 4)],
        "'text_input' batch size does not match other inputs",
    ),
}


@pytest.mark.parametrize(("tensors", "message"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_cannot_be(server, tensors, message):
    error = send(server, *tensors)
    assert error is not None, "it was served"
    assert message in error
    assert "\n" not in error.strip()


FIELDS = [
    ({"input_ids": [1] * MAX_SEQ_LEN}, f"the prompt has {MAX_SEQ_LEN} tokens, the engine takes at most 255"),
    ({"text_input": "ab" * 600}, "tokens, the engine takes at most 255"),
    ({"text_input": "🙂" * (1 << 18)}, "shorten the prompt"),
    ({"text_input": ""}, "the prompt is empty"),
    ({"text_input": "a", "input_ids": [1]}, "send one of them"),
    ({"input_ids": [-1]}, "token id -1"),
    ({"input_ids": [320]}, "token id 320"),
    ({"max_tokens": 0}, "max_tokens is 0, allowed is 1 or more"),
    ({"max_tokens": -(2**31)}, "max_tokens is -2147483648"),
    ({"min_tokens": 17}, "min_tokens is 17, allowed is 0 to max_tokens"),
    ({"temperature": -INF}, "temperature is -inf"),
    ({"temperature": NAN}, "temperature is nan"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_p": 0.0}, "top_p is 0.0, allowed is more than 0 and at most 1"),
    ({"min_p": 1.5}, "min_p is 1.5"),
    ({"presence_penalty": -101.0}, "presence_penalty is -101.0, allowed is -100 to 100"),
    ({"frequency_penalty": NAN}, "frequency_penalty is nan"),
    ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
    ({"embedding_bias_words": ["a"], "embedding_bias_weights": [INF]}, "is inf; it must be a finite number"),
    ({"beam_width": 0}, "beam_width is 0, allowed is 1"),
    ({"num_return_sequences": 300}, "num_return_sequences is 300"),
    ({"stop_words": ["x"] * 100_000}, "100000 entries, allowed are at most 64"),
    ({"end_id": 999}, "token id 999"),
    ({"priority": 7.0}, "priority is 7.0"),
    ({"timeout_ms": -1.0}, "timeout_ms is -1.0"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS, ids=[message for _, message in FIELDS])
def test_values_out_of_range(server, fields, message):
    with GrpcClient(server.grpc_url) as client, pytest.raises(ResponseError) as caught:
        list(client.stream(**({} if fields.keys() & {"input_ids", "text_input"} else {"text_input": "a"}) | fields))
    assert message in str(caught.value)
    assert caught.value.code == "INVALID_ARG"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert set(fields) <= set(INPUT_DTYPES)


def ask(server, prompt=None, **fields):
    with GrpcClient(server.grpc_url) as client:
        responses = list(client.stream(prompt, **{"max_tokens": 20, "end_id": -1} | fields))
    return "".join(response.text for response in responses), responses[-1]


def test_a_top_k_above_the_vocabulary_keeps_all_of_it(server):
    fields = {"temperature": 1.0, "seed": 5}
    assert ask(server, "hello", top_k=2**31 - 1, **fields)[0] == ask(server, "hello", **fields)[0]


def test_more_drafts_than_the_engine_takes_are_clamped_and_the_answer_counts_them(server):
    wanted, found = ask(server, "hello", num_draft_tokens=4), ask(server, "hello", num_draft_tokens=2**31 - 1)
    assert found[0] == wanted[0] == ask(server, "hello", num_draft_tokens=0)[0]
    assert found[1].num_draft_tokens == wanted[1].num_draft_tokens > 0


def test_a_prompt_and_a_limit_that_pass_the_sequence_end_with_length(server):
    _, final = ask(server, input_ids=[7] * 200, max_tokens=MAX_SEQ_LEN)
    assert (final.finish_reason, final.num_output_tokens) == ("length", MAX_SEQ_LEN - 200)


@pytest.mark.parametrize(
    "prompt", ["a\0b", "\ufeffdef f():", "שלום عالم", "\u202eabc", "e\u0301\u200b", "\r\n\t\x1b[31m"]
)
def test_unusual_text_comes_back_as_it_was_sent(server, tokenizer, prompt):
    for answer in (
        ask(server, prompt, stream=False)[0],
        generate_http(server.http_url, prompt, max_tokens=20, end_id=-1).text,
    ):
        assert answer.startswith(prompt)
        assert answer[len(prompt) :] == ask(server, input_ids=tokenizer.encode(prompt))[0]


def test_special_tokens_in_text_are_text(server, tokenizer):
    assert len(tokenizer.encode(END_OF_TEXT, parse_special_tokens=True)) == 1
    answer, final = ask(server, END_OF_TEXT, stream=False)
    assert final.num_input_tokens == len(tokenizer.encode(END_OF_TEXT)) > 1
    assert answer.startswith(END_OF_TEXT)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0}])
def test_bad_words_that_ban_every_token_still_give_an_answer(server, tokenizer, sampling):
    words = sorted({tokenizer.decode([i], skip_special_tokens=False) for i in range(320)} - {""})
    words = [word for word in words if "\ufffd" not in word]
    assert len(words) > 100
    answer, final = ask(server, "hello", bad_words=words, **sampling)
    assert final.finish_reason == "length"
    assert final.num_output_tokens == 20
    assert "nan" not in answer


def test_the_same_request_id_at_the_same_time_is_two_streams(server):
    prompts = ["hello world", "def f(x):", "abc"]
    expected = [ask(server, prompt)[0] for prompt in prompts]
    texts: dict[int, str] = {}

    def read(number):
        with GrpcClient(server.grpc_url) as client:  # each begins its ids with 1
            texts[number] = "".join(r.text for r in client.stream(prompts[number % 3], max_tokens=20, end_id=-1))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [texts[number] for number in range(12)] == expected * 4


def test_a_request_id_of_a_megabyte_is_refused(server):
    error = send(server, text("a"), request_id="x" * 1_000_000)
    assert error == "the request id has 1000000 bytes, allowed are at most 4096"
    assert send(server, text("a"), int32("max_tokens", 2), request_id="x" * 4096) is None


def post(server, path, body):
    """Status and parsed JSON of a POST."""
    request = urllib.request.Request(f"{server.http_url}/v2/models/{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_models_and_versions_that_are_not_there(server):
    body = b'{"text_input": "a", "max_tokens": 2}'
    for path in ("nothing/generate", "faser/versions/7/generate", "faser/versions/x/generate"):
        status, answer = post(server, path, body)
        assert 400 <= status < 500, (path, status)
        assert "error" in answer
    assert "unknown model: 'nothing'" in send(server, text("a"), model="nothing")
    assert "version 7" in send(server, text("a"), model="faser", version="7")


@pytest.mark.parametrize("value", ["1.5", '"3"', "null", "[1, 2]", "{}", "true", "1e3"])
def test_json_values_that_are_no_integer(server, value):
    """Triton 2.51 answers some of these with 500: that is its own, ours is that nothing is guessed."""
    status, answer = post(server, "faser/generate", b'{"text_input": "a", "max_tokens": %s}' % value.encode())
    assert status in (400, 500)
    assert "error" in answer, answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"text_input": "a", "max_tokens": "many"}', "Unable to parse"),
        (b'{"text_input": "\\ud800"}', "surrogate"),
        *((body, "") for body in (b"", b"{", b'{"a": "b", "max_to', b"nul", b"[" * 100_000, b'{"a":' * 20_000)),
    ],
)
def test_json_that_cannot_be(server, body, message):
    for path in ("faser/generate", "faser/generate_stream"):
        status, answer = post(server, path, body)
        assert status >= 400
        assert message in answer["error"]


def test_a_number_that_no_float32_holds(server):
    _, answer = post(server, "faser/generate", b'{"text_input": "a", "temperature": 1e60}')
    assert "temperature is inf, allowed is 0 (greedy) to 100" in answer["error"]


def test_a_body_of_64_mb_does_not_end_the_server(server):
    """The proxy refuses more than 4 MB; see test_proxy.py."""
    with pytest.raises(ResponseError, match="shorten the prompt"):
        generate_http(server.http_url, "a" * (5 << 20), max_tokens=2)
    body = b'{"text_input": "%s", "max_tokens": 2}' % (b"a" * (64 << 20))
    try:
        status, answer = post(server, "faser/generate", body)
    except (http.client.HTTPException, OSError) as error:
        pytest.fail(f"no answer: {error!r}")
    assert 400 <= status < 500
    assert "bytes, allowed are at most 67108864" in answer["error"]


def test_generate_gives_one_answer_with_all_of_the_text(server):
    answer = generate_http(server.http_url, "hello", max_tokens=20, end_id=-1, exclude_input_in_output=True)
    assert (answer.text, answer.finish_reason) == (ask(server, "hello")[0], "length")
    assert len(answer.token_ids) == 20
