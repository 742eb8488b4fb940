"""Tests of the statistics of drafts in answers, the field `prediction`, and the metrics page that benchmarks read."""

import asyncio
import http.server
import json
import threading
import urllib.request
from itertools import count

import pytest

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.serving.client import Response
from faser_trtllm.serving.observe.page import fresh_page
from faser_trtllm.serving.openai.reply import Reply
from faser_trtllm.serving.openai.request import parse_completion
from faser_trtllm.serving.openai.served_model import ServedModel
from faser_trtllm.serving.openai.server import OpenAIOptions, serve_openai
from faser_trtllm.serving.text.acceptance import Acceptance
from faser_trtllm.serving.text.request import MAX_PREDICTION_CHARS
from tests.support.openai_frontend import Frontend

ASK = {"model": "faser", "prompt": "a"}
STEPS = Acceptance((1, 1, 0, 1), (3, 3, 2), (3, 0, 1))
SUMMARY = {
    "mean_acceptance_length": 1 + 4 / 3,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [1, 1, 0, 1],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 8,
    "num_spec_tokens": 3,
}
DETAILED = SUMMARY | {"per_step_accepted": [3, 0, 1], "per_step_drafted": [3, 3, 2]}


def reply_to(level, **fields):
    return Reply(parse_completion(ASK | fields, ServedModel("faser", spec_decode_metrics=level)), "faser", None)


def final(**fields):
    return Response("text", (1, 2), "length", 1, 2, **fields)


@pytest.mark.parametrize(("level", "record"), [("summary", SUMMARY), ("detailed", DETAILED)])
def test_an_answer_has_vllm_s_record(level, record):
    reply = reply_to(level)
    reply.add(0, final(acceptance=STEPS))
    assert reply.whole()["metrics"] == {"speculative_decoding": record}


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_stream_has_it_in_its_last_chunk_alone(include_usage):
    reply = reply_to("summary", stream=True, stream_options={"include_usage": include_usage})
    first = reply.chunks(0, Response("a", (1,)))
    *others, last = [*first, *reply.chunks(0, final(acceptance=STEPS)), *reply.last_chunks()]
    assert last["metrics"] == {"speculative_decoding": SUMMARY}
    assert (last["choices"] == []) == include_usage
    assert all("metrics" not in chunk for chunk in others)


def test_without_the_option_nothing_is_asked_for_and_nothing_told():
    request = parse_completion(ASK, ServedModel("faser"))
    assert "return_acceptance" not in request.inputs
    reply = reply_to("none")
    reply.add(0, final(acceptance=STEPS))
    assert "metrics" not in reply.whole()


def test_of_several_sequences_there_is_none_as_in_vllm():
    request = parse_completion(ASK | {"n": 2}, ServedModel("faser", spec_decode_metrics="summary"))
    assert "return_acceptance" not in request.inputs


def test_a_request_without_drafts_has_a_record_of_no_steps():
    reply = reply_to("detailed")
    reply.add(0, final(acceptance=Acceptance((0, 0), (), ())))
    record = reply.whole()["metrics"]["speculative_decoding"]
    assert (record["mean_acceptance_length"], record["draft_acceptance_rate"], record["num_spec_steps"]) == (1, 0, 0)
    assert "per_step_accepted" not in record


def test_the_option_has_vllm_s_values():
    with pytest.raises(InvalidArgumentError, match="is all, allowed are none, summary, detailed") as caught:
        serve_openai(OpenAIOptions(per_request_spec_decode_metrics="all"))
    assert caught.value.field == "per_request_spec_decode_metrics"


def test_the_use_of_a_prediction_is_part_of_the_usage():
    reply = reply_to("none", n=2)
    for index in (0, 1):
        reply.add(index, final(prediction=(5, 1)))
    details = {"accepted_prediction_tokens": 10, "rejected_prediction_tokens": 2}
    assert reply.whole()["usage"]["completion_tokens_details"] == details
    reply = reply_to("none")
    reply.add(0, final())
    assert "completion_tokens_details" not in reply.whole()["usage"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("def f():", "def f():"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ("é" * MAX_PREDICTION_CHARS, "é" * MAX_PREDICTION_CHARS),
        ("", None),
        ([], None),
    ],
)
def test_a_prediction_is_a_text_or_parts_of_one(content, text):
    ask = ASK | {"prediction": {"type": "content", "content": content}}
    assert parse_completion(ask, ServedModel("faser")).inputs.get("prediction") == text


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("text", 'prediction is a string; it must be {"type": "content", "content": TEXT}'),
        ({"content": "a"}, "prediction.type is null, allowed is content"),
        ({"type": "draft", "content": "a"}, 'prediction.type is "draft", allowed is content'),
        ({"type": "content", "content": 3}, "prediction.content is a number; it must be a string"),
        ({"type": "content"}, "prediction.content is null; it must be a string"),
        ({"type": "content", "content": "a", "x": 1}, 'prediction has "x", allowed are type and content'),
        (
            {"type": "content", "content": [{"type": "image_url"}]},
            'prediction.content has a part of type "image_url", allowed is text',
        ),
        (
            {"type": "content", "content": ["a"] * 65},
            "prediction.content has 65 parts, allowed are at most 64",
        ),
        (
            {"type": "content", "content": "a" * (MAX_PREDICTION_CHARS + 1)},
            f"prediction has {MAX_PREDICTION_CHARS + 1} characters, allowed are at most {MAX_PREDICTION_CHARS}",
        ),
    ],
)
def test_a_bad_prediction_is_one_sentence(value, sentence):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_completion(ASK | {"prediction": value}, ServedModel("faser"))
    assert str(caught.value) == sentence


class Page(http.server.BaseHTTPRequestHandler):
    """Triton's page; the engine publishes with every third request for it, if it does."""

    publishes = True
    numbers = count()

    def do_GET(self):
        stamp = next(self.numbers) // 3 if self.publishes else 0
        text = f'nv_trt_llm_general_metrics{{general_type="timestamp",model="tensorrt_llm"}} {stamp}\nx{{}} 1\n'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def page_url():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()


def test_the_page_of_metrics_is_newer_than_the_request_for_it(page_url):
    def stamp():
        return asyncio.run(fresh_page(page_url)).split(b"\n")[0].split()[-1]

    assert [stamp() for _ in range(3)] == [b"1", b"2", b"3"]


def test_an_engine_that_does_not_publish_delays_its_page_and_no_more(page_url, monkeypatch):
    monkeypatch.setattr(Page, "publishes", False)
    assert b"x{} 1" in asyncio.run(fresh_page(page_url))


@pytest.fixture(scope="module")
def observed(triton, engine_dir, tmp_path_factory):
    arguments = ("--url", f"grpc://{triton.grpc_url}", "--engine_dir", engine_dir)
    arguments += ("--per-request-spec-decode-metrics", "detailed")
    arguments += ("--metrics_url", f"http://127.0.0.1:{triton.ports[2]}/metrics")
    with Frontend(tmp_path_factory.mktemp("observed") / "log", *arguments) as frontend:
        yield frontend.wait_ready()


def post(frontend, path, **body):
    data = json.dumps({"model": "faser", **body}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{frontend.port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def last_record(answer, stream):
    """The last event that is JSON, or the whole answer."""
    text = answer.split(b"\n\n")[-3].removeprefix(b"data: ") if stream else answer
    return json.loads(text)


def check_record(record):
    """Check a record as aiperf does before it accepts it (SpecDecodeAcceptanceRecord)."""
    histogram, accepted, drafted = (
        record[n] for n in ("acceptance_histogram", "per_step_accepted", "per_step_drafted")
    )
    assert len(histogram) == record["num_spec_tokens"] + 1
    assert sum(histogram) == record["num_spec_steps"] == len(accepted) == len(drafted)
    assert [sum(one == j for one in accepted) for j in range(len(histogram))] == histogram
    assert sum(accepted) == record["num_accepted_draft_tokens"]
    assert sum(drafted) == record["num_draft_tokens"]
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))


def scraped(frontend):
    """The counters as vLLM 0.33.0's `vllm bench serve` reads them: names that begin so and end in _total."""
    with urllib.request.urlopen(f"http://127.0.0.1:{frontend.port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().split("\n")
    found = {}
    for line in lines:
        name = line.split("{")[0]
        if line.startswith("vllm:spec_decode") and name.endswith("_total"):
            place = line.split('position="')[1].split('"')[0] if 'position="' in line else ""
            key = f"{name.removeprefix('vllm:spec_decode_').removesuffix('_total')}{place}"
            found[key] = found.get(key, 0) + int(float(line.split()[-1]))
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_answers_tell_is_what_vllm_s_benchmark_counts(observed, path, stream):
    """Its requests, between two looks at the page of metrics."""
    body = {"max_tokens": 24, "temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    asked = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": "hello"}
    before = scraped(observed)
    records = []
    for _ in range(3):
        answer = last_record(post(observed, path, **body, **asked), stream)
        assert answer["usage"]["completion_tokens"] == 24
        records.append(answer["metrics"]["speculative_decoding"])
        check_record(records[-1])
    after = scraped(observed)
    counted = {name: after[name] - before[name] for name in after}

    def total(name):
        return sum(record[name] for record in records)

    assert counted["num_drafts"] == total("num_spec_steps") > 0
    assert counted["num_draft_tokens"] == total("num_draft_tokens")
    assert counted["num_accepted_tokens"] == total("num_accepted_draft_tokens") > 0
    for place in range(4):
        at_least = sum(sum(record["acceptance_histogram"][place + 1 :]) for record in records)
        assert counted[f"num_accepted_tokens_per_pos{place}"] == at_least


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prediction_changes_passes_and_no_text(observed, path):
    body = {"max_tokens": 40, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": "hello"}

    def ask(**fields):
        answer = json.loads(post(observed, path, **body, **fields))
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "chat" in path else choice["text"]
        steps = answer["metrics"]["speculative_decoding"]["num_spec_steps"]
        return text, steps, answer["usage"].get("completion_tokens_details")

    text, steps, details = ask()
    assert details is None
    same, few, details = ask(prediction={"type": "content", "content": text})
    assert same == text
    assert few < steps
    assert details["accepted_prediction_tokens"] > 5, "random tokens are other ones after a way through text"
    same, _, details = ask(prediction={"type": "content", "content": text[::-1]})
    assert same == text
    assert details["rejected_prediction_tokens"] > 0
