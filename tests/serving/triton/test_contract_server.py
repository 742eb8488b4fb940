"""TensorRT-LLM's models in a real Triton server over real engines, asked in the shapes of its public client scripts."""

import contextlib
import json
import os
import queue
import signal
import time
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.launch.process import PARENT_OPTION, command_line
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.text.service import TextGenerator
from faser_trtllm.serving.triton.request import SEED_STEP
from tests.serving.triton.contract_clients import (
    STOP,
    end_to_end_inputs,
    inputs_of,
    llm_client_inputs,
    send,
    stacked,
    succeed,
    tokens_of,
)
from tests.support.engine_dirs import make_engine_dir
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

MAX_SEQ_LEN = 512
TEXT_MODELS = ["ensemble", "tensorrt_llm_bls"]
PROMPTS = ["hello world", "def f(x):", "naïve 😀"]
LONG = 450


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    sizes = {"max_batch_size": 32, "max_seq_len": MAX_SEQ_LEN, "max_draft_len": 4, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), **sizes)


@pytest.fixture(scope="module")
def server(engine_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    config = directory / "faser.yaml"
    config.write_text("stop_by_id: true\n")  # TensorRT-LLM's rule
    options = {"speculation": "fixed:4", "allow_control": True, "config": config}
    with Server(engine_dir, **options, log=directory / "log") as server:
        server.wait_ready()
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            for model in [*TEXT_MODELS, "tensorrt_llm"]:
                client.load_model(model)
        yield server


@pytest.fixture(scope="module")
def tokenizer(engine_dir):
    return Tokenizer.load(EngineDir.load(engine_dir).tokenizer_dir)


@pytest.fixture(scope="module")
def alone(engine_dir, tokenizer):
    """The answer of the target alone, in process: alone(prompt, **fields of TextRequest)."""
    with contextlib.closing(open_executor(engine_dir, ExecutorConfig(speculation="off"))) as executor:
        generator = TextGenerator(executor, tokenizer)

        def answer(prompt, **fields):
            outputs = []
            fields = {"stream": False, "exclude_input_in_output": True, "end_ids": ()} | fields
            generator.submit("alone", TextRequest(text=prompt, **fields), outputs.append)
            while not outputs:
                assert executor.step()
            return outputs[-1]

        yield answer


PERF_OUTPUTS = [
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
]


@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_end_to_end_client(server, alone, model, prompt):
    """Its default temperature of 1 alone is greedy, as in TensorRT-LLM."""
    expected = alone(prompt, max_tokens=20).text
    (whole,) = succeed(send(server, model, end_to_end_inputs(prompt), ["text_output"]))
    assert whole.as_numpy("text_output")[0].decode() == prompt + expected
    streamed = succeed(send(server, model, end_to_end_inputs(prompt, streaming=True), ["text_output"]))
    assert "".join(result.as_numpy("text_output")[0].decode() for result in streamed) == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_end_to_end_client_with_a_batch(server, alone, streaming):
    inputs = stacked([end_to_end_inputs(prompt, 15, streaming) for prompt in PROMPTS])
    results = succeed(send(server, "ensemble", inputs, ["text_output", "batch_index"]))
    texts = [""] * 3
    for result in results:
        assert result.as_numpy("batch_index").shape == (1, 1)
        texts[result.as_numpy("batch_index")[0][0]] += result.as_numpy("text_output")[0].decode()
    prefixes = [""] * 3 if streaming else PROMPTS
    assert texts == [a + alone(b, max_tokens=15).text for a, b in zip(prefixes, PROMPTS, strict=True)]


def test_sequences_of_one_request_are_independent_samples_with_the_stated_seeds(server, alone):
    seed = 2**64 - 3
    more = {
        "num_return_sequences": np.array([[3]], np.int32),
        "seed": np.array([[seed]], np.uint64),
        "top_p": np.array([[0.95]], np.float32),
        "exclude_input_in_output": np.array([[True]], bool),
    }
    inputs = stacked([end_to_end_inputs(prompt, 12, **more) for prompt in PROMPTS[:2]])
    outputs = ["text_output", "sequence_index", "batch_index"]
    texts = {}
    for result in succeed(send(server, "tensorrt_llm_bls", inputs, outputs)):
        where = result.as_numpy("batch_index")[0][0], result.as_numpy("sequence_index")[0][0]
        assert where not in texts
        texts[where] = result.as_numpy("text_output")[0].decode()
    for (batch_index, i), text in texts.items():
        own_seed = (seed + int(i) * SEED_STEP) % 2**64
        fields = {"max_tokens": 12, "temperature": 1.0, "top_p": float(np.float32(0.95)), "seed": own_seed}
        assert text == alone(PROMPTS[batch_index], **fields).text
    assert len(set(texts.values())) == len(texts) == 6


@pytest.mark.parametrize("streaming", [False, True])
def test_end_to_end_client_with_log_probs_logits_and_perf_metrics(server, alone, streaming):
    more = {
        "return_log_probs": np.array([[True]], bool),
        "return_context_logits": np.array([[False]], bool),
        "return_generation_logits": np.array([[True]], bool),
        "return_perf_metrics": np.array([[True]], bool),
        "num_return_sequences": np.array([[1]], np.int32),
    }
    outputs = ["text_output", "cum_log_probs", "output_log_probs", "context_logits", "generation_logits", *PERF_OUTPUTS]
    prompt = "hello world, hello world, hello world"
    inputs = end_to_end_inputs(prompt, 20, streaming, **more)
    before_ns = time.perf_counter_ns()
    results = succeed(send(server, "ensemble", inputs, outputs))
    expected = alone(prompt, max_tokens=20, return_log_probs=True, return_generation_logits=True)
    last = results[-1]
    num_tokens = 0
    for result in results:  # as TensorRT-LLM's createResult: all so far
        num_tokens += result.as_numpy("generation_logits").shape[2]
        log_probs = result.as_numpy("output_log_probs")
        assert log_probs.dtype == np.float32
        assert np.array_equal(log_probs, np.array([[expected.log_probs[:num_tokens]]], np.float32))
    assert last.as_numpy("cum_log_probs") == pytest.approx(sum(expected.log_probs))
    assert last.as_numpy("cum_log_probs").shape == (1, 1)
    logits = np.concatenate([result.as_numpy("generation_logits") for result in results], axis=2)
    assert logits.shape == (1, 1, 20, 320)
    assert logits.tobytes() == expected.logits
    assert last.as_numpy("context_logits") is None
    metrics = {name: last.as_numpy(name) for name in PERF_OUTPUTS}
    assert {array.shape for array in metrics.values()} == {(1, 1)}
    number = {name: array[0][0] for name, array in metrics.items()}
    assert 0 < number["total_accepted_draft_tokens"] <= number["total_draft_tokens"]
    assert number["acceptance_rate"] == pytest.approx(
        number["total_accepted_draft_tokens"] / number["total_draft_tokens"]
    )
    total = number["kv_cache_alloc_total_blocks"]
    assert total == number["kv_cache_alloc_new_blocks"] + number["kv_cache_reused_blocks"] >= (len(prompt) + 20) // 16
    times = [number[name] for name in PERF_OUTPUTS if name.endswith("_ns")]
    assert times == sorted(times)
    assert before_ns < times[0]
    assert times[-1] < time.perf_counter_ns()
    for result in results[:-1]:  # NVIDIA's client reads them in each
        so_far = {name: result.as_numpy(name)[0][0] for name in PERF_OUTPUTS}
        assert so_far["arrival_time_ns"] == number["arrival_time_ns"]
        assert so_far["total_draft_tokens"] <= number["total_draft_tokens"]


def test_what_is_not_asked_for_is_not_sent(server):
    (result,) = succeed(send(server, "ensemble", end_to_end_inputs("hello")))
    assert names_of(result) == ["text_output"]


def names_of(result):
    return [output.name for output in result.get_response().outputs]


def test_outputs_come_in_tensorrt_llm_s_order(server):
    """Clients read outputs[0]; TensorRT-LLM's backend writes them in this order (fillTritonResponse)."""
    flags = ("return_log_probs", "return_generation_logits", "return_num_input_tokens", "return_num_output_tokens")
    more = {name: np.array([[True]]) for name in (*flags, "return_perf_metrics")}
    counts = ["num_input_tokens", "num_output_tokens", *PERF_OUTPUTS]
    rows = ["generation_logits", "output_log_probs", "cum_log_probs"]
    for result in succeed(send(server, "tensorrt_llm", llm_client_inputs([4, 5, 6], 12, True, **more))):
        assert names_of(result) == ["output_ids", "sequence_length", *rows, *counts]
    (result,) = succeed(send(server, "ensemble", end_to_end_inputs("hello", **more)))
    assert names_of(result) == ["text_output", *rows, *counts]
    two = stacked([llm_client_inputs([4, 5, 6]), llm_client_inputs([7, 8, 9])])
    for result in succeed(send(server, "tensorrt_llm", two | {"num_return_sequences": np.array([[2]] * 2, np.int32)})):
        assert names_of(result) == ["output_ids", "sequence_length", "batch_index", "sequence_index"]


def test_each_response_of_a_stream_counts_its_own_tokens(server):
    """The counts are those of TensorRT-LLM; NVIDIA's OpenAI frontend adds them up."""
    more = {name: np.array([[True]]) for name in ("return_num_input_tokens", "return_num_output_tokens")}
    results = succeed(send(server, "tensorrt_llm", llm_client_inputs([4, 5, 6], 12, True, **more)))
    assert [result.as_numpy("num_output_tokens")[0][0] for result in results] == list(map(len, map(tokens_of, results)))
    assert {result.as_numpy("num_input_tokens")[0][0] for result in results} == {3}
    (whole,) = succeed(send(server, "tensorrt_llm", llm_client_inputs([4, 5, 6], 12, **more)))
    assert whole.as_numpy("num_output_tokens")[0][0] == 12


def test_speculation_per_request(server):
    perf = {"return_perf_metrics": np.array([[True]], bool)}
    for num_drafts in (0, 2):
        more = perf | {
            "num_draft_tokens": np.array([[num_drafts]], np.int32),
            "use_draft_logits": np.array([[True]], bool),
        }
        (result,) = succeed(send(server, "tensorrt_llm_bls", end_to_end_inputs("hello", **more)))
        assert bool(result.as_numpy("total_draft_tokens")[0][0]) == bool(num_drafts)


def test_names_of_older_clients(server, alone):
    more = {
        "min_length": np.array([[7]], np.int32),
        "random_seed": np.array([[5]], np.uint64),
        "top_k": np.array([[40]], np.int32),
        "return_kv_cache_reuse_stats": np.array([[True]], bool),
    }
    (result,) = succeed(send(server, "ensemble", end_to_end_inputs("hello", **more)))
    expected = alone("hello", max_tokens=20, temperature=1.0, seed=5, top_k=40, min_tokens=7)
    assert result.as_numpy("text_output")[0].decode() == "hello" + expected.text
    assert result.as_numpy("kv_cache_alloc_total_blocks")[0][0] > 0


@pytest.mark.parametrize("prompt", PROMPTS)
def test_llm_client(server, alone, tokenizer, prompt):
    token_ids = tokenizer.encode(prompt)
    expected = list(alone(prompt, max_tokens=16).token_ids)
    (whole,) = succeed(send(server, "tensorrt_llm", llm_client_inputs(token_ids)))
    assert tokens_of(whole) == token_ids + expected
    short = llm_client_inputs(token_ids, exclude_input_in_output=np.array([[True]], bool))
    assert tokens_of(succeed(send(server, "tensorrt_llm", short))[0]) == expected
    streamed = succeed(send(server, "tensorrt_llm", llm_client_inputs(token_ids, streaming=True)))
    assert [token for result in streamed for token in tokens_of(result)] == expected


def test_llm_client_with_words_bias_and_a_padded_batch(server, alone, tokenizer):
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    free = [list(alone(prompt, max_tokens=16).token_ids) for prompt in PROMPTS]
    width = max(map(len, prompts))
    stop = next(free[0][i : i + 2] for i in range(4, 15) if free[0][i : i + 2])
    bias = np.zeros((3, 320), np.float32)
    bias[2, free[2][0]] = -1e9
    inputs = stacked([llm_client_inputs([0])] * 3) | {
        "input_ids": np.array([ids + [9] * (width - len(ids)) for ids in prompts], np.int32),
        "input_lengths": np.array([[len(ids)] for ids in prompts], np.int32),
        "stop_words_list": np.array([[stop, [2, -1]]] * 3, np.int32),
        "bad_words_list": np.array([[[0], [-1]], [[free[1][0]], [1]], [[0], [-1]]], np.int32),
        "embedding_bias": bias,
        "exclude_input_in_output": np.array([[True]] * 3, bool),
    }
    found = {r.as_numpy("batch_index")[0][0]: tokens_of(r) for r in succeed(send(server, "tensorrt_llm", inputs))}
    cut = next(i for i in range(15) if free[0][i : i + 2] == stop)
    assert found[0] == free[0][:cut]
    assert free[1][0] not in found[1]
    assert free[2][0] not in found[2]
    assert set(found) == {0, 1, 2}


def test_a_stop_request_ends_with_an_empty_final_response(server, tokenizer):
    def stop(client):
        time.sleep(0.02)
        parameters = {"Streaming": True}
        more = {"request_id": "12345", "parameters": parameters, "enable_empty_final_response": True}
        client.async_stream_infer("tensorrt_llm", inputs_of(STOP), **more)

    for streaming in (False, True):
        exclude = np.array([[True]], bool)
        tensors = stacked(
            [llm_client_inputs(tokenizer.encode("hello"), LONG, streaming, exclude_input_in_output=exclude)] * 32
        )
        results = succeed(send(server, "tensorrt_llm", tensors, request_id="12345", while_open=stop))
        tokens = [tokens_of(r) for r in results if r.as_numpy("output_ids") is not None]
        assert len(results) - len(tokens) == 1  # the answer to the stop request
        assert sum(map(len, tokens)) < 32 * LONG
        if not streaming:
            assert len(tokens) == 32


def test_a_stop_request_needs_an_id_and_may_come_late(server):
    (error,) = send(server, "tensorrt_llm", STOP)
    assert "A request id must be provided for request cancellation" in str(error)
    (result,) = succeed(send(server, "tensorrt_llm", STOP, request_id="none", enable_empty_final_response=True))
    assert result.as_numpy("output_ids") is None


@pytest.mark.parametrize("model", [*TEXT_MODELS, "tensorrt_llm"])
def test_cancelling_ends_the_request_in_the_engine(server, tokenizer, model):
    """All of a batch, in every model."""
    make = llm_client_inputs if model == "tensorrt_llm" else end_to_end_inputs
    prompt = tokenizer.encode("hello") if model == "tensorrt_llm" else "hello"
    inputs = stacked([make(prompt, LONG, True)] * 64)
    before = num_output_tokens(server)
    received = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: received.put(error or result))
        client.async_stream_infer(model, inputs_of(inputs))
        received.get(timeout=PATIENCE_S)
        client.stop_stream(cancel_requests=True)
    results = list(received.queue)
    assert results[-1].status() == "StatusCode.CANCELLED"
    wait_until_idle(server)
    assert num_output_tokens(server) - before < 64 * LONG


def wait_until_idle(server):
    """Until the engine's metrics, which are published once a second, say so; `faser` was loaded first and runs it."""
    name = 'nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="{}"'
    assert server.metric(name.format("max")) == 32
    counted_s = time.time() + 0.2  # older numbers may still be on their way
    wait_until(lambda: server.metric('nv_trt_llm_general_metrics{general_type="timestamp"') > counted_s)
    wait_until(lambda: server.metric(name.format("active")) == 0)
    blocks = 'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{}"'
    assert server.metric(blocks.format("max")) > 0
    wait_until(lambda: server.metric(blocks.format("used")) == 0)


def num_output_tokens(server):
    return server.metric("faser_generation_tokens_total")


BAD = [
    ("ensemble", {"beam_width": np.array([[4]], np.int32)}, "beam_width is 4, allowed is 1; beam search is not"),
    ("ensemble", {"lora_task_id": np.array([[3]], np.uint64)}, "lora_task_id was sent, but LoRA is not supported"),
    ("ensemble", {"return_context_logits": np.array([[True]])}, "return_context_logits was sent, but prompt tokens"),
    ("ensemble", {"max_tokens": np.array([[0]], np.int32)}, "max_tokens is 0"),
    ("tensorrt_llm_bls", {"image_url_input": np.array([["http://x"]], object)}, "image_url_input was sent, but images"),
    (
        "tensorrt_llm_bls",
        {
            "guided_decoding_guide": np.array([["{}"]], object),
            "guided_decoding_guide_type": np.array([["structural_tag"]], object),
        },
        "guided_decoding_guide_type is structural_tag, allowed are json, json_schema, regex, ebnf_grammar",
    ),
    ("tensorrt_llm", {"request_output_len": np.array([[0]], np.int32)}, "request_output_len is 0"),
    ("tensorrt_llm", {"input_lengths": np.array([[9]], np.int32)}, "input_lengths is 9, input_ids has 2"),
    ("tensorrt_llm", {"input_ids": np.array([[1, 999]], np.int32)}, "the prompt holds token id 999"),
    (
        "tensorrt_llm",
        {"draft_input_ids": np.array([[1, 2]], np.int32)},
        "draft_input_ids was sent, but draft tokens come",
    ),
    ("tensorrt_llm", {"runtime_top_p": np.array([[1.5]], np.float32)}, "runtime_top_p is 1.5"),
    ("tensorrt_llm", {"stop_words_list": np.array([[[999], [1]]], np.int32)}, "stop_words_list holds token id 999"),
    (
        "tensorrt_llm",
        {"stop_words_list": np.array([[[1], [5]]], np.int32)},
        "stop_words_list has a word that ends at 5",
    ),
]


@pytest.mark.parametrize(("model", "tensors", "message"), BAD, ids=[message for _, _, message in BAD])
def test_what_cannot_be_is_one_sentence(server, model, tensors, message):
    inputs = llm_client_inputs([1, 2]) if model == "tensorrt_llm" else end_to_end_inputs("a")
    (error,) = send(server, model, inputs | tensors)
    assert isinstance(error, InferenceServerException)
    assert message in error.message()
    assert "\n" not in error.message()


@pytest.mark.parametrize("max_tokens", [MAX_SEQ_LEN, MAX_SEQ_LEN + 1, 2**31 - 1])
def test_max_tokens_is_cut_at_the_end_of_the_context(server, max_tokens):
    (result,) = succeed(send(server, "tensorrt_llm", llm_client_inputs([4, 5, 6], max_tokens)))
    assert len(tokens_of(result)) == MAX_SEQ_LEN


def test_one_bad_item_ends_a_batch_with_its_sentence(server):
    bad = end_to_end_inputs("a", max_tokens=np.array([[-1]], np.int32))
    inputs = stacked([end_to_end_inputs("b", LONG), bad])
    (error,) = send(server, "ensemble", inputs)
    assert "max_tokens is -1" in str(error)
    wait_until_idle(server)


def test_the_request_of_the_readme_over_http(server, alone):
    body = {"text_input": "hello world", "max_tokens": 20, "bad_words": "", "stop_words": "", "end_id": -1, "id": "42"}
    request = urllib.request.Request(f"{server.http_url}/v2/models/ensemble/generate", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=20) as answer:
        found = json.load(answer)
    assert found["text_output"] == "hello world" + alone("hello world", max_tokens=20).text
    assert found["id"] == "42"


def engine_pids(server):
    return [pid for pid in server.pids() if any(arg.startswith(PARENT_OPTION) for arg in command_line(pid))]


def answers(server):
    """Return whether every model answers."""
    results = [send(server, model, end_to_end_inputs("a", 2)) for model in TEXT_MODELS]
    results.append(send(server, "tensorrt_llm", llm_client_inputs([1, 2], 2)))
    return not any(isinstance(result, InferenceServerException) for (result,) in results)


def test_all_models_share_one_engine_and_survive_its_end(server):
    (pid,) = engine_pids(server)

    def kill(client):
        time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)

    inputs = stacked([end_to_end_inputs("hello", LONG, True)] * 64)
    (*_, error) = send(server, "ensemble", inputs, while_open=kill)
    # The last of the 64 may reach the backend after the kill.
    assert any(said in str(error) for said in ("send the request again", "starting again after a crash"))
    wait_until(lambda: answers(server))
    assert len(engine_pids(server)) == 1
    assert engine_pids(server) != [pid]


def test_another_model_takes_the_engine_over_when_its_owner_is_unloaded(server):
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.unload_model("faser")
        wait_until(lambda: not client.is_model_ready("faser"))
        wait_until(lambda: answers(server))
        assert len(engine_pids(server)) == 1
        client.load_model("faser")
        assert answers(server)
        assert len(engine_pids(server)) == 1
