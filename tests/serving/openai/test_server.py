"""OpenAI's API end to end: its client package against `faser openai`, real engines and a real Triton server."""

import asyncio
import http.client
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.client import GrpcClient
from faser_trtllm.serving.triton.request import SEED_STEP
from tests.support.effort import pick
from tests.support.openai_frontend import MAX_SEQ_LEN, Frontend
from tests.support.triton_server import Server, children, free_ports
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "naïve 😀"}]
CHAT_PROMPT = "system: be brief\nuser: naïve 😀\nassistant:"
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def model_s_own(triton, prompt, **fields):
    """(text, finish reason, token ids) as the Triton model gives them."""
    ask = {"input_ids": prompt} if isinstance(prompt, list) else {"text_input": prompt}
    with GrpcClient(triton.grpc_url) as grpc_client:
        responses = list(grpc_client.stream(**ask, **fields))
    ids = [token for response in responses for token in response.token_ids]
    return "".join(response.text for response in responses), responses[-1].finish_reason, ids


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("faser", "model", "faser")
    assert client.models.retrieve("faser").id == "faser"
    with pytest.raises(openai.NotFoundError, match="does not exist, this server has faser"):
        client.models.retrieve("gpt")


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_the_model_s_text(client, triton, stream):
    expected, _, _ = model_s_own(triton, "hello", max_tokens=40, end_id=-1)
    asked = {"model": "faser", "prompt": "hello", "max_tokens": 40} | GREEDY
    if not stream:
        answer = client.completions.create(**asked)
        assert (answer.object, answer.id[:5], answer.model) == ("text_completion", "cmpl-", "faser")
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (expected, "length", 0, None)
        assert answer.usage.completion_tokens == 40
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 40
        return
    lengths = []

    def comes_in_pieces():
        """A chunk holds what was made since the last one was taken: on a busy machine that may be everything."""
        chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert len({chunk.id for chunk in chunks}) == 1
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected
        reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 40
        assert all(chunk.usage is None for chunk in chunks[:-1])
        lengths.append(len(reasons))
        return len(reasons) > 1

    wait_until(comes_in_pieces)
    assert max(lengths) < 40  # one per step, not one per token


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_the_template_s_prompt_continued(client, triton, engine_dir, stream):
    prompt = Tokenizer.load(engine_dir).encode(CHAT_PROMPT)
    expected, _, _ = model_s_own(triton, prompt, max_tokens=30, end_id=-1)
    asked = {"model": "faser", "messages": MESSAGES, "max_completion_tokens": 30} | GREEDY
    if not stream:
        answer = client.chat.completions.create(**asked)
        (choice,) = answer.choices
        assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected, "length")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 30)
        return
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert all(chunk.usage is None for chunk in chunks)


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_sequence(client):
    answer = client.chat.completions.create(model="faser", messages=MESSAGES, **GREEDY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == MAX_SEQ_LEN


def test_n_and_seeds_are_the_model_s_sequences(client, triton):
    seed = 2**63 - 5
    fields = {"max_tokens": 12, "temperature": 0.8}
    answer = client.completions.create(model="faser", prompt=["hello", "abc"], n=2, seed=seed, **fields)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [
        model_s_own(triton, prompt, seed=(seed + i * SEED_STEP) % 2**64, **fields)[0]
        for prompt in ("hello", "abc")
        for i in range(2)
    ]
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == 4
    one = client.completions.create(model="faser", prompt="hello", n=2, seed=seed, **fields).usage
    other = client.completions.create(model="faser", prompt="hello", n=1, seed=seed, **fields).usage
    assert one.prompt_tokens == other.prompt_tokens  # a prompt counts once
    chunks = list(client.completions.create(model="faser", prompt="hello", n=2, seed=seed, stream=True, **fields))
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == expected[index]
        assert mine[-1].finish_reason in ("stop", "length")
    unseeded = client.completions.create(model="faser", prompt="hello", n=4, max_tokens=30)
    assert len({choice.text for choice in unseeded.choices}) > 1  # temperature 1 unless told otherwise


def test_a_bias_reaches_the_model(client, triton):
    fields = {"max_tokens": 8, "end_id": -1}
    _, _, ids = model_s_own(triton, "hello", **fields)
    expected, _, others = model_s_own(triton, "hello", **fields, logit_bias_ids=[ids[0]], logit_bias_values=[-100.0])
    assert ids[0] not in others
    bias = {str(ids[0]): -100}
    answer = client.completions.create(model="faser", prompt="hello", max_tokens=8, logit_bias=bias, **GREEDY)
    assert answer.choices[0].text == expected


def test_one_of_the_choices_is_the_answer(client):
    texts = ["c++ (yes)", "a|b", "no."]
    for n, body in enumerate(({"structured_outputs": {"choice": texts}}, {"guided_choice": texts})):
        answer = client.completions.create(model="faser", prompt="hello", max_tokens=40, seed=n, extra_body=body)
        assert answer.choices[0].text in texts
        assert answer.choices[0].finish_reason == "stop"


def test_usage_tells_the_cached_tokens_and_with_every_chunk_where_it_is_asked_for(client):
    prompt = [7, 8, 9, 10] * 12  # three blocks, the last of which is not whole when a token is left to compute
    asked = {"model": "faser", "prompt": prompt, "max_tokens": 24} | GREEDY
    cached = [client.completions.create(**asked).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert cached[0] == 0
    assert cached[1] in (32, 47)
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk.usage for chunk in client.completions.create(**asked, stream=True, stream_options=options)]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] == 24
    assert all(usage.prompt_tokens == len(prompt) for usage in usages)
    assert all(usage.prompt_tokens_details.cached_tokens == cached[1] for usage in usages)


def test_a_prompt_that_is_too_long_has_openai_s_code(client):
    for prompt in ([5] * MAX_SEQ_LEN, "ab" * 100_000):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="faser", prompt=prompt, max_tokens=1)
        assert refused.value.code == "context_length_exceeded"
        message = refused.value.body["message"]  # litellm looks for these words of OpenAI's to try another model
        assert message.startswith(f"this model's maximum context length is {MAX_SEQ_LEN} tokens: ")
        assert message.endswith("shorten the prompt")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="faser", prompt=[320], max_tokens=1)
    assert refused.value.code is None


def test_metrics_of_triton_are_on_this_port_too(triton, engine_dir, tmp_path):
    url = f"http://127.0.0.1:{triton.ports[2]}/metrics"
    asked = ("--url", triton.grpc_url, "--metrics_url", url, "--api_key", "secret-key", "--allowed_origins", "*")
    with Frontend(tmp_path / "log", *asked) as frontend:
        frontend.wait_ready()
        with urllib.request.urlopen(f"http://127.0.0.1:{frontend.port}/metrics", timeout=PATIENCE_S) as answer:
            assert b"faser_request_success_total" in answer.read()
        with frontend.client() as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai.OpenAI(base_url=f"http://127.0.0.1:{frontend.port}/v1", api_key="secret-key") as client:
            assert client.models.list().data[0].id == "faser"


def test_stop_ends_the_text_before_it(client, triton):
    text, _, _ = model_s_own(triton, "hello", max_tokens=40, end_id=-1)
    word = text[10:13]
    choice = client.completions.create(model="faser", prompt="hello", max_tokens=40, stop=[word], **GREEDY).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(word)], "stop")


def test_penalties_reach_the_model(client, triton):
    fields = {"max_tokens": 30, "presence_penalty": 1.5, "frequency_penalty": 1.0}
    expected, _, _ = model_s_own(triton, "hello", end_id=-1, **fields)
    plain, _, _ = model_s_own(triton, "hello", end_id=-1, max_tokens=30)
    assert client.completions.create(model="faser", prompt="hello", **fields, **GREEDY).choices[0].text == expected
    assert expected != plain


def test_log_probs_are_those_of_every_token_and_do_not_depend_on_drafts(client, triton):
    def ask(num_draft_tokens, stream=False):
        body = {"ignore_eos": True, "num_draft_tokens": num_draft_tokens}
        fields = {
            "model": "faser",
            "messages": MESSAGES,
            "max_tokens": 20,
            "seed": 3,
            "logprobs": True,
            "stream": stream,
        }
        answer = client.chat.completions.create(**fields, extra_body=body)
        if not stream:
            return [(entry.token, entry.logprob) for entry in answer.choices[0].logprobs.content]
        logprobs = [chunk.choices[0].logprobs for chunk in answer]
        return [(entry.token, entry.logprob) for found in logprobs if found for entry in found.content]

    expected = ask(0)
    assert len(expected) == 20
    assert all(logprob < 0 for _, logprob in expected)
    for got in (ask(4), ask(4, stream=True)):
        assert [token for token, _ in got] == [token for token, _ in expected]
        assert [logprob for _, logprob in got] == pytest.approx([logprob for _, logprob in expected], abs=1e-5)
    answer = client.completions.create(model="faser", prompt="hello", max_tokens=9, logprobs=0, **GREEDY).choices[0]
    logprobs = answer.logprobs
    assert "".join(logprobs.tokens) == answer.text.replace("\ufffd", "") or "\ufffd" in answer.text
    assert len(logprobs.token_logprobs) == len(logprobs.text_offset) == 9
    assert [next(iter(top.values())) for top in logprobs.top_logprobs] == logprobs.token_logprobs


def post(frontend, path, body, content_type="application/json"):
    """(status, headers, JSON of the answer)"""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{frontend.port}{path}", data, {"Content-Type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as failure:
        return failure.code, failure.headers, json.load(failure)


ASK = {"model": "faser", "prompt": "a", "max_tokens": 2}
BAD = [
    (ASK | {"prompt": "ab" * 600}, 400, "tokens, the engine takes at most 511", "prompt"),
    (ASK | {"prompt": "ab" * 600, "stream": True}, 400, "tokens, the engine takes at most 511", "prompt"),
    (ASK | {"prompt": [320]}, 400, "prompt holds token id 320", "prompt"),
    (ASK | {"top_p": 0}, 400, "top_p is 0, allowed is more than 0", "top_p"),
    (ASK | {"min_tokens": 3}, 400, "min_tokens is 3", "min_tokens"),
    (ASK | {"logit_bias": {"320": 1}}, 400, "logit_bias holds token id 320", "logit_bias"),
    (ASK | {"guided_regex": "("}, 400, "guided_regex is not a valid regex", "guided_regex"),
    (ASK | {"model": "gpt"}, 404, "does not exist", "model"),
    (b"{", 400, "not valid JSON", None),
    (b"[" * 100_000, 400, "nested too deeply", None),
    (b" " * (4 << 20) + b"{}", 413, "max_body_bytes", None),
]


def test_errors_are_openai_s_json_with_the_right_status(frontend):
    for body, status, message, param in BAD:
        got, _, answer = post(frontend, "/v1/completions", body)
        assert got == status, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert message in answer["error"]["message"], answer
        assert answer["error"]["param"] == param
        assert "\n" not in answer["error"]["message"]
        assert "text_input" not in answer["error"]["message"]
    assert post(frontend, "/v1/completions", ASK, "text/plain")[0] == 415
    assert post(frontend, "/v1/embeddings", ASK)[0] == 404
    assert post(frontend, "/v1/models", ASK)[0] == 405
    assert post(frontend, "/v1/completions", ASK)[0] == 200


def running(triton):
    return triton.metric("faser_num_requests_running") + triton.metric("faser_num_requests_waiting")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_requests(frontend, triton, stream):
    def cancelled():
        return triton.metric('faser_request_success_total{finished_reason="cancelled"')

    wait_until(lambda: running(triton) == 0)
    before = cancelled()
    # Eight times what runs at once: the metrics tell of it, once a second, before it is done.
    body = {"model": "faser", "prompt": ["hello", "abc"], "n": 64, "max_tokens": 500, "stream": stream}
    body["ignore_eos"] = True
    connection = http.client.HTTPConnection("127.0.0.1", frontend.port)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        connection.getresponse().read(1)
    else:
        wait_until(lambda: running(triton) > 0)
    connection.close()
    wait_until(lambda: cancelled() - before >= 20 and running(triton) == 0)


def test_streams_side_by_side_do_not_mix(frontend, triton):
    prompts = ["hello", "abc", "def f(x):", "naïve 😀"]
    expected = {prompt: model_s_own(triton, prompt, max_tokens=30, end_id=-1)[0] for prompt in prompts}

    async def ask(client, prompt):
        stream = await client.completions.create(model="faser", prompt=prompt, max_tokens=30, stream=True, **GREEDY)
        return prompt, "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all():
        url = f"http://127.0.0.1:{frontend.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts * 6))

    answers = asyncio.run(ask_all())
    assert len(answers) == 24
    assert all(text == expected[prompt] for prompt, text in answers)


def test_a_dead_triton_is_503_with_a_hint_and_health_says_so(engine_dir, tmp_path):
    slow = {"FASER_FAULT": "engine_hang@step1+:20ms"}  # so that the stream is not at its end when the engine dies
    with Server(engine_dir, log=tmp_path / "triton", environment=slow) as triton:
        triton.wait_ready()
        with Frontend(tmp_path / "log", "--url", triton.grpc_url) as frontend:
            frontend.wait_ready()
            health = f"http://127.0.0.1:{frontend.port}/health"
            with urllib.request.urlopen(health, timeout=PATIENCE_S) as answer:
                assert answer.status == 200
            assert post(frontend, "/v1/completions", ASK)[0] == 200
            assert post(frontend, "/v1/chat/completions", {"model": "faser", "messages": MESSAGES})[0] == 400
            with frontend.client() as client:
                fields = {"max_tokens": 500, "n": 64, "stream": True}  # four times what runs at once
                stream = client.completions.create(model="faser", prompt="a", **fields, **GREEDY)
                next(stream)
                os.kill(triton.engine_pid(), signal.SIGKILL)
                with pytest.raises(openai.APIError, match=r"send the request again|try again"):
                    list(stream)
            triton.__exit__()
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(health, timeout=PATIENCE_S)
            status, headers, answer = post(frontend, "/v1/completions", ASK)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert answer["error"]["message"] == "the Triton server cannot be reached; try again in a moment"
            frontend.process.send_signal(signal.SIGTERM)
            assert frontend.process.wait(PATIENCE_S) == 0


def descendants(pid):
    found = children(pid)
    return found + [pid for child in found for pid in descendants(child)]


def test_one_command_starts_triton_too_and_drains_both(engine_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("FASER_API_KEY", "secret-key")
    http_port, grpc_port, metrics_port = free_ports()
    ports = ("--http_port", http_port, "--grpc_port", grpc_port, "--metrics_port", metrics_port)
    with Frontend(tmp_path / "log", "--engine_dir", engine_dir, "--speculation", "fixed:2", *ports) as frontend:
        frontend.wait_ready()
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in descendants(frontend.process.pid)]
        assert len(environments) >= 2, "Triton and the engine process"
        assert not any(b"secret-key" in environment for environment in environments)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{frontend.port}/v1", api_key="secret-key") as client:
            stream = client.completions.create(model="faser", prompt="hello", max_tokens=300, stream=True, **GREEDY)
            next(stream)
            frontend.process.send_signal(signal.SIGTERM)
            chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert frontend.process.wait(PATIENCE_S) == 0
    assert f"ready: faser on http://127.0.0.1:{frontend.port}/v1" in frontend.log.read_text()


def test_its_own_triton_is_started_again_after_a_signal_but_not_after_its_own_end(engine_dir, tmp_path):
    ask = ASK | {"temperature": 0, "ignore_eos": True}
    http_port, grpc_port, metrics_port = free_ports()
    ports = ("--http_port", http_port, "--grpc_port", grpc_port, "--metrics_port", metrics_port)
    with Frontend(tmp_path / "log", "--engine_dir", engine_dir, *ports) as frontend:
        frontend.wait_ready()
        expected = post(frontend, "/v1/completions", ask)
        assert expected[0] == 200
        (triton_pid,) = children(frontend.process.pid)
        os.kill(triton_pid, signal.SIGKILL)

        def answers():
            status, _, answer = post(frontend, "/v1/completions", ask)
            assert status in (200, 503), answer
            return status == 200 and answer["choices"] == expected[2]["choices"]

        wait_until(lambda: children(frontend.process.pid) not in ([triton_pid], []))
        wait_until(answers)
        assert "the server was ended by SIGKILL and is started again" in frontend.log.read_text()
        wait_until(lambda: "the server is ready again" in frontend.log.read_text())
        (triton_pid,) = children(frontend.process.pid)
        os.kill(triton_pid, signal.SIGTERM)  # somebody else stops it
        assert frontend.process.wait(PATIENCE_S) == 1
        assert "the server ended by itself; see its messages" in frontend.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "grpc://127.0.0.1:1"), "no Triton server with a ready model answers at 127.0.0.1:1"),
        (("--url", "grpc://a:1", "--max_body_bytes", "5"), "max_body_bytes is 5"),
        *pick(
            [],
            [
                ((), "engine_dir is not set"),
                (("--url", "http://localhost:8001"), "it must look like grpc://127.0.0.1:8001"),
                (("--url", "grpc://a:1", "--chat_template", "x"), "chat_template needs the tokenizer's files"),
            ],
        ),
    ],
)
def test_a_start_that_cannot_work_is_one_sentence(tmp_path, arguments, message):
    with Frontend(tmp_path / "log", *arguments) as frontend:
        assert frontend.process.wait(PATIENCE_S) == 2
    assert message in frontend.log.read_text()
    assert frontend.log.read_text().count("\n") == 1
