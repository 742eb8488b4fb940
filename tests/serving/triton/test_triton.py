"""Real engines behind a real Triton server, asked by tritonclient and over HTTP."""

import contextlib
import json
import os
import signal
import urllib.error
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from faser_trtllm.config import ExecutorConfig
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.serving.client import GrpcClient, ResponseError, generate_http, stream_http
from faser_trtllm.serving.text.offline import generate_all
from tests.serving.triton.contract_clients import send, succeed
from tests.support.engine_dirs import make_engine_dir
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

MAX_SEQ_LEN = 512
PROMPTS = ["hello world", "def f(x):", "abc " * 30, "naïve 😀"]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    sizes = {"max_batch_size": 64, "max_seq_len": MAX_SEQ_LEN, "max_draft_len": 4, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), **sizes)


@pytest.fixture(scope="module")
def server(engine_dir, tmp_path_factory):
    """Its timeouts are hours: no test passes because of one."""
    directory = tmp_path_factory.mktemp("server")
    config = directory / "faser.yaml"
    config.write_text("health_timeout_s: 7200\nhang_timeout_s: 7200\n")
    with Server(engine_dir, config=config, speculation="fixed:4", log=directory / "log") as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def alone(engine_dir):
    """Greedy tokens of each prompt, by the target alone, in process and one prompt at a time."""
    answers = {}
    for prompt in PROMPTS:
        with contextlib.closing(open_executor(engine_dir, ExecutorConfig(speculation="off"))) as executor:
            fields = {"max_tokens": 40, "end_ids": ()}
            (answers[prompt],) = generate_all(executor, engine_dir, [prompt], fields)
    return answers


GREEDY = {"max_tokens": 40, "end_id": -1}


def gather(responses):
    responses = list(responses)
    assert all(not response.is_final for response in responses[:-1])
    text = "".join(response.text for response in responses)
    return text, tuple(token for response in responses for token in response.token_ids), responses[-1]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_way_gives_the_target_s_own_tokens(server, alone, prompt):
    expected = alone[prompt].text, alone[prompt].token_ids
    with GrpcClient(server.grpc_url) as client:
        text, token_ids, final = gather(client.stream(prompt, **GREEDY))
        assert (text, token_ids) == expected
        assert (final.finish_reason, final.num_output_tokens) == ("length", 40)
        assert final.num_draft_tokens > 0
        plain = gather(client.stream(prompt, num_draft_tokens=0, **GREEDY))
        assert plain[:2] == expected
        assert plain[2].num_draft_tokens == 0
        whole = gather(client.stream(prompt, stream=False, **GREEDY))
        assert whole[:2] == (prompt + expected[0], expected[1])
    assert gather(stream_http(server.http_url, prompt, **GREEDY))[:2] == expected
    answer = generate_http(server.http_url, prompt, exclude_input_in_output=True, **GREEDY)
    assert (answer.text, answer.token_ids) == expected


@pytest.mark.parametrize("streams", [False, True])
def test_log_probs_of_prompts_and_the_most_probable_tokens(server, streams):
    """In the first response those of the prompt; of what the model then says, those that the same text has as a
    prompt."""
    prompt, num_top = [5, 6, 7] * 9, 3
    flags = {"return_context_log_probs": True, "return_log_probs": True, "stream": streams}

    def ask(input_ids, **more):
        tensors = {"input_ids": np.array([input_ids], np.int32), "max_tokens": np.array([[20]], np.int32)}
        tensors |= {name: np.array([[value]], bool) for name, value in flags.items()}
        tensors |= {name: np.array([[value]], np.int32) for name, value in more.items()}
        return succeed(send(server, "faser", tensors))

    def joined(results, name):
        return np.concatenate([result.as_numpy(name) for result in results], axis=2)

    results = ask(prompt, num_top_log_probs=num_top, end_id=-1)
    first = results[0]
    assert first.as_numpy("context_ids").tolist() == [[prompt]]
    assert first.as_numpy("context_log_probs").shape == (1, 1, len(prompt) - 1)
    for name in ("ids", "log_probs"):
        assert first.as_numpy(f"context_top_{name}").shape == (1, 1, len(prompt) - 1, num_top)
        assert joined(results, f"output_top_{name}").shape == (1, 1, 20, num_top)
    assert all(result.as_numpy("context_ids") is None for result in results[1:])
    output_ids = joined(results, "output_ids")
    assert np.array_equal(joined(results, "output_top_ids")[..., 0], output_ids), "it is greedy"
    assert np.array_equal(joined(results, "output_top_log_probs")[..., 0], joined(results, "output_log_probs"))

    (sent, *_) = ask(prompt + output_ids[0, 0].tolist(), num_top_log_probs=num_top, num_draft_tokens=0)
    for name in ("log_probs", "top_ids", "top_log_probs"):
        both = np.concatenate([first.as_numpy(f"context_{name}"), joined(results, f"output_{name}")], axis=2)
        assert np.array_equal(sent.as_numpy(f"context_{name}"), both)
    plain = ask(prompt)
    names = {output.name for result in plain for output in result.get_response().outputs}
    assert {"context_ids", "context_log_probs", "output_log_probs"} <= names
    assert not {name for name in names if "_top_" in name}


def test_log_probs_of_prompts_over_http(server):
    body = {"text_input": "abc", "max_tokens": 2, "return_context_log_probs": True, "num_top_log_probs": 2}
    request = urllib.request.Request(f"{server.http_url}/v2/models/faser/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        found = json.load(answer)
    assert len(found["context_log_probs"]) == len(found["context_ids"]) - 1
    assert len(found["context_top_ids"]) == len(found["context_top_log_probs"]) == 2 * len(found["context_log_probs"])


def test_one_response_per_step_not_per_token(server):
    with GrpcClient(server.grpc_url) as client:
        responses = list(client.stream("hello", max_tokens=200, end_id=-1))
    final = responses[-1]
    assert final.num_accepted_tokens > 0
    assert len(responses) < final.num_output_tokens


def test_accepted_drafts_are_marked_if_asked_for(server):
    fields = {"max_tokens": 60, "end_id": -1}
    with GrpcClient(server.grpc_url) as client:
        marked = list(client.stream("hello", return_is_draft=True, **fields))
        plain = list(client.stream("hello", **fields))
        whole = list(client.stream("hello", stream=False, return_is_draft=True, **fields))
    http = list(stream_http(server.http_url, "hello", return_is_draft=True, **fields))
    for responses in (marked, whole, http):
        assert all(len(response.is_draft) == len(response.token_ids) for response in responses)
        assert sum(sum(response.is_draft) for response in responses) == responses[-1].num_accepted_tokens > 0
    assert all(response.is_draft == () for response in plain)
    assert [token for r in marked for token in r.token_ids] == [token for r in plain for token in r.token_ids]


def test_streams_side_by_side_do_not_mix(server, alone):
    with GrpcClient(server.grpc_url) as client:
        prompts = {client.send(prompt, stream=True, **GREEDY): prompt for prompt in PROMPTS * 8}
        texts = dict.fromkeys(prompts, "")
        num_open = len(prompts)
        while num_open:
            request_id, response = client.receive(PATIENCE_S)
            texts[request_id] += response.text
            num_open -= response.is_final
    for request_id, prompt in prompts.items():
        assert texts[request_id] == alone[prompt].text


def test_a_seed_gives_one_text_with_and_without_speculation(server):
    fields = {"max_tokens": 60, "temperature": 1.0, "seed": 2**63 + 5, "end_id": -1}
    with GrpcClient(server.grpc_url) as client:
        texts = {gather(client.stream("hello", num_draft_tokens=n, **fields))[0] for n in (0, 2, 4)}
        other = gather(client.stream("hello", **fields | {"seed": 6}))[0]
    assert len(texts) == 1
    assert other not in texts


def test_ids_in_ids_out_and_the_end_of_the_sequence(server):
    with GrpcClient(server.grpc_url) as client:
        ids = list(range(2, 2 + 20))
        _, token_ids, final = gather(client.stream(input_ids=ids, max_tokens=MAX_SEQ_LEN, end_id=-1))
    assert final.finish_reason == "length"
    assert final.num_input_tokens == 20
    assert len(token_ids) == final.num_output_tokens == MAX_SEQ_LEN - 20


def test_stop_words_end_the_text_before_them(server, alone):
    text = alone["hello world"].text
    start = len(text) // 2
    word = text[start : start + 3]
    with GrpcClient(server.grpc_url) as client:
        stopped, _, final = gather(client.stream("hello world", stop_words=["", word], **GREEDY))
    assert final.finish_reason == "stop"
    assert stopped == text[: text.index(word)]


def test_what_triton_s_openai_frontend_sends(server):
    values = {
        "text_input": ("BYTES", np.array([["hello"]], dtype=object)),
        "stream": ("BOOL", np.array([[True]])),
        "max_tokens": ("INT32", np.array([[8]], np.int32)),
        "stop_words": ("BYTES", np.array([["\x01\x02"]], dtype=object)),
        "top_p": ("FP32", np.array([[0.9]], np.float32)),
        "temperature": ("FP32", np.array([[0.7]], np.float32)),
        "frequency_penalty": ("FP32", np.array([[0.1]], np.float32)),
        "presence_penalty": ("FP32", np.array([[0.1]], np.float32)),
        "seed": ("UINT64", np.array([[3]], np.uint64)),
        "return_num_input_tokens": ("BOOL", np.array([[True]])),
        "return_num_output_tokens": ("BOOL", np.array([[True]])),
    }
    final = infer(server, values)
    assert final.as_numpy("text_output").shape == (1,)
    assert final.as_numpy("num_input_tokens").tolist() == [[5]]
    assert final.as_numpy("num_output_tokens").tolist() == [[8]]


def infer(server, values):
    """Send tensors as they are; the last response, or ResponseError."""
    inputs = []
    for name, (dtype, array) in values.items():
        inputs.append(grpcclient.InferInput(name, list(array.shape), dtype))
        inputs[-1].set_data_from_numpy(array)
    with GrpcClient(server.grpc_url) as client:
        client._client.async_stream_infer("faser", inputs, enable_empty_final_response=True)
        while True:
            result, error = client._answers.get(timeout=PATIENCE_S)
            if error is not None:
                raise ResponseError(error.message())
            if result.get_response().parameters["triton_final_response"].bool_param:
                return result


def test_a_thousand_cancelled_streams_give_every_block_back(server):
    def blocks(kind):
        return server.metric(f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{kind}"')

    def requests(state):
        return server.metric(f"faser_num_requests_{state}")

    def failures():
        return server.metric('faser_request_failures_total{code="CANCELLED"')

    failures_before = failures()
    client = GrpcClient(server.grpc_url)
    for i in range(1000):
        client.send(f"{i} hello", max_tokens=MAX_SEQ_LEN, end_id=-1, stream=True)
    wait_until(lambda: requests("waiting") >= 600)
    client.close(cancel=True)
    wait_until(lambda: requests("running") == requests("waiting") == 0)
    assert blocks("max") > 0
    wait_until(lambda: blocks("free") == blocks("max"))
    wait_until(lambda: failures() - failures_before >= 600)
    assert generate_http(server.http_url, "a", max_tokens=2).text


def test_a_prefix_is_cached_under_its_own_salt_only(server):
    """The count tells nobody what others have sent."""
    prompt = "diagnosis code F32.1, salary 81000"
    salts = (None, "a", "b", "a", None)
    asked = [{"cache_salt": salt} if salt else {} for salt in salts]
    asked += [{"cache_salt_id": 7}, {"cache_salt_id": 7, "cache_salt": "a"}, {"cache_salt_id": 7}]
    counts = [generate_http(server.http_url, prompt, max_tokens=2, **salt).num_cached_tokens for salt in asked]
    assert counts[:3] + counts[5:7] == [0] * 5
    assert counts[3] == counts[4] == counts[7] > 0
    with pytest.raises(ResponseError, match="cache_salt has 257 characters, allowed are at most 256"):
        generate_http(server.http_url, prompt, max_tokens=2, cache_salt="x" * 257)


def test_a_deadline_in_the_queue_is_a_sentence(server):
    with GrpcClient(server.grpc_url) as client:
        for _ in range(64):
            client.send("busy", max_tokens=MAX_SEQ_LEN, end_id=-1)
        late = client.send("late", max_tokens=4, timeout_ms=0.001)  # before the next step, whatever slots are free
        messages = []
        num_done = 0
        while num_done < 64:
            try:
                request_id, _ = client.receive(PATIENCE_S)
                assert request_id != late
                num_done += 1
            except ResponseError as error:
                messages.append(str(error))
    assert len(messages) == 1
    assert "timed out" in messages[0]


def test_kill_of_the_engine_under_streams(server, alone):
    with GrpcClient(server.grpc_url) as client:
        for _ in range(50):
            client.send("busy", max_tokens=MAX_SEQ_LEN, end_id=-1, stream=True)
        client.receive(PATIENCE_S)
        os.kill(server.engine_pid(), signal.SIGKILL)
        num_ended, messages = 0, []
        while num_ended < 50:
            try:
                num_ended += client.receive(PATIENCE_S)[1].is_final
            except ResponseError as error:
                messages.append(str(error))
                num_ended += 1
    assert messages
    assert all("send the request again" in text or "try again in" in text for text in messages)

    def answer():
        with contextlib.suppress(ResponseError):
            return generate_http(server.http_url, "hello world", exclude_input_in_output=True, **GREEDY).text

    wait_until(lambda: answer() == alone["hello world"].text)
