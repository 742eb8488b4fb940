"""Guided decoding end to end: a real Triton server with real engines, its four models, and OpenAI's client."""

import json
import re
import threading

import numpy as np
import openai
import pytest

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.client import GrpcClient, ResponseError
from tests.serving.triton.contract_clients import end_to_end_inputs, llm_client_inputs, send, succeed
from tests.support.engine_dirs import make_engine_dir
from tests.support.openai_frontend import TEMPLATE, Frontend
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PATTERN = r"[a-f]{2,6}-[0-9]{3}"
JSON = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)}
REGEX = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": PATTERN}
GRAMMAR = {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": 'root ::= "<" [a-c]+ ">"'}


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    sizes = {"max_batch_size": 16, "max_seq_len": 512, "max_draft_len": 4, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), TEMPLATE, **sizes)


@pytest.fixture(scope="module")
def server(engine_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("triton") / "log"
    with Server(engine_dir, speculation="fixed:4", models=None, log=log) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def client(server, engine_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("frontend") / "log"
    arguments = ("--url", f"grpc://{server.grpc_url}", "--engine_dir", engine_dir)
    with Frontend(log, *arguments) as frontend, frontend.wait_ready().client() as client:
        yield client


def ask(server, text="hello", **fields):
    """(text, token ids, last response)"""
    with GrpcClient(server.grpc_url) as client:
        responses = list(client.stream(text, **({"max_tokens": 60} | fields)))
    return "".join(r.text for r in responses), [t for r in responses for t in r.token_ids], responses[-1]


def follows_schema(text):
    value = json.loads(text)
    return set(value) == {"name", "ok"} and len(value["name"]) <= 6 and isinstance(value["ok"], bool)


SAMPLINGS = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.5, "top_p": 0.95}]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded", "sampled"])
def test_the_output_follows_its_guide_whatever_the_speculation(server, sampling):
    for guide, is_good in [(JSON, follows_schema), (REGEX, re.compile(PATTERN).fullmatch)]:
        text, ids, last = ask(server, **guide, **sampling)
        assert last.finish_reason == "stop"
        assert is_good(text), text
        assert last.num_draft_tokens > 0
        if sampling != SAMPLINGS[2]:
            plain = ask(server, **guide, **sampling, num_draft_tokens=0)
            assert plain[:2] == (text, ids)


def test_requests_without_a_guide_do_not_notice_those_beside_them(server):
    alone = ask(server, "abc", max_tokens=120, end_id=-1)[:2]
    stop = threading.Event()

    def disturb(seed):
        while not stop.is_set():
            assert follows_schema(ask(server, **JSON, temperature=1.2, seed=seed)[0])

    threads = [threading.Thread(target=disturb, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            assert ask(server, "abc", max_tokens=120, end_id=-1)[:2] == alone
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_tensorrt_llm_s_models_take_the_same_guides(server, engine_dir):
    tokenizer = Tokenizer.load(EngineDir.load(engine_dir).tokenizer_dir)
    (eos,) = tokenizer.eos_token_ids
    guide = {name: np.array([[value]], object) for name, value in GRAMMAR.items()}
    end = {"end_id": np.array([[eos]], np.int32), "exclude_input_in_output": np.array([[True]])}
    for model in ("ensemble", "tensorrt_llm_bls"):
        (result,) = succeed(send(server, model, end_to_end_inputs("abc", 200) | guide | end))
        text = result.as_numpy("text_output")[0].decode()
        assert text.startswith("<")
        assert re.fullmatch(r"<[a-c]+>?", text)
    inputs = llm_client_inputs(tokenizer.encode("abc"), 200)
    del inputs["end_id"]  # without one the grammar's own end is the output's
    (result,) = succeed(
        send(server, "tensorrt_llm", inputs | {**guide, "exclude_input_in_output": end["exclude_input_in_output"]})
    )
    ids = result.as_numpy("output_ids").reshape(-1).tolist()
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (REGEX | {"guided_decoding_guide": "a(b"}, "guided_decoding_guide is not a valid regex: "),
        (JSON | {"guided_decoding_guide": "{"}, "guided_decoding_guide is not a valid json_schema: "),
        ({"guided_decoding_guide_type": "structural_tag"}, "guided_decoding_guide_type is structural_tag, allowed are"),
    ],
)
def test_a_wrong_guide_is_one_sentence(server, fields, message):
    with pytest.raises(ResponseError) as caught:
        ask(server, **fields)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_clients_that_leave_cancel_guided_requests_that_run_or_wait_for_their_guides(server):
    def cancelled():
        return server.metric('faser_request_failures_total{code="CANCELLED",model="faser"')

    def leave_early():
        """Return whether anybody was cancelled: a client on a busy machine may leave after the last token."""
        client = GrpcClient(server.grpc_url)
        for number in range(30):
            guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": f"(a|b){{{400 + number}}}"}
            client.send("hello", **guide, max_tokens=500, stream=True)
        client.receive(PATIENCE_S)
        client.close(cancel=True)
        wait_until(lambda: server.metric("faser_num_requests_running") == 0)
        return cancelled() > before

    before = cancelled()
    wait_until(leave_early)
    assert ask(server, **REGEX)[2].finish_reason == "stop"


def test_openai_s_response_format(client):
    asked = {"model": "faser", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 80, "temperature": 1.0}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        answer = client.chat.completions.create(**asked, seed=seed, response_format=wanted).choices[0]
        assert answer.finish_reason == "stop"
        assert follows_schema(answer.message.content)
    stream = client.chat.completions.create(**asked, seed=0, response_format=wanted, stream=True)
    assert follows_schema("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    anything = client.chat.completions.create(**asked, seed=1, response_format={"type": "json_object"}).choices[0]
    assert anything.message.content.lstrip()[0] == "{"
    if anything.finish_reason == "stop":
        assert isinstance(json.loads(anything.message.content), dict)


@pytest.mark.parametrize("extra", [{"guided_regex": PATTERN}, {"structured_outputs": {"regex": PATTERN}}])
def test_vllm_s_names(client, extra):
    answer = client.completions.create(model="faser", prompt="hi", max_tokens=40, temperature=1.0, extra_body=extra)
    assert re.fullmatch(PATTERN, answer.choices[0].text)


def test_a_wrong_response_format_is_a_bad_request(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "thing"}}}
    with pytest.raises(openai.BadRequestError, match="is not a valid json_schema: Invalid type: thing"):
        client.chat.completions.create(
            model="faser", messages=[{"role": "user", "content": "hi"}], response_format=wanted
        )
