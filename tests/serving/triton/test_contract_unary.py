"""Models that are not decoupled, as TensorRT-LLM's templates make them: for clients that use HTTP's or gRPC's infer."""

import queue

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from faser_trtllm.builder.build import BuildOptions, build_engines
from tests.serving.triton.contract_clients import STOP, end_to_end_inputs, inputs_of, llm_client_inputs, stacked
from tests.support.checkpoints import make_pair
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]


NUM_TOKENS = 900  # long beside the time in which twelve requests arrive


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("unary")
    target, draft = make_pair(directory, 320, max_position_embeddings=1024)
    sizes = {"max_batch_size": 16, "max_seq_len": 1024, "max_draft_len": 4, "tokens_per_block": 16}
    build_engines(BuildOptions(target, draft, directory / "engine", **sizes))
    models = ("ensemble", "tensorrt_llm")
    config = directory / "faser.yaml"
    config.write_text("stop_by_id: true\n")  # TensorRT-LLM's rule
    with Server(
        directory / "engine",
        models=models,
        config=config,
        decoupled=False,
        speculation="fixed:4",
        allow_control=True,
        log=directory / "log",
    ) as server:
        yield server.wait_ready()


def test_http_clients_get_one_answer_each_and_run_as_one_batch(server):
    """They infer asynchronously over HTTP, as do tools/inflight_batcher_llm/end_to_end_test.py and identity_test.py."""
    prompts = ["hello world", "def f(x):", "abc"] * 4
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.ports[0]}", concurrency=12) as client:
        asked = [
            client.async_infer("ensemble", inputs_of(end_to_end_inputs(p, NUM_TOKENS), httpclient)) for p in prompts
        ]
        texts = [request.get_result().as_numpy("text_output")[0].decode() for request in asked]
    assert all(text.startswith(prompt) and len(text) > len(prompt) for prompt, text in zip(prompts, texts, strict=True))
    assert texts[:3] * 4 == texts
    wait_until(lambda: server.metric("faser_generation_tokens_total") >= 12 * NUM_TOKENS)
    assert (
        server.metric("faser_steps_total") < 12 * NUM_TOKENS / 5 / 2
    )  # half of what one after the other would take at best


def test_the_llm_client_without_streaming_and_a_stop_request(server):
    """The client infers asynchronously over gRPC, as inflight_batcher_llm_client.py without --streaming does."""
    results = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:

        def infer(tensors, request_id):
            def answered(result, error):
                results.put(error or result)

            client.async_infer("tensorrt_llm", inputs_of(tensors), answered, request_id=request_id)

        infer(llm_client_inputs([5, 6], 8), "1")
        answer = results.get(timeout=PATIENCE_S)
        assert answer.as_numpy("output_ids").shape == (1, 1, 10)
        assert answer.as_numpy("output_ids")[0][0][:2].tolist() == [5, 6]
        infer(STOP, "2")
        answer = results.get(timeout=PATIENCE_S)
        assert not isinstance(answer, InferenceServerException), answer
        assert answer.as_numpy("output_ids") is None


BAD = [
    (end_to_end_inputs("a", streaming=True), "Streaming is only supported in decoupled mode."),
    (stacked([end_to_end_inputs("a")] * 2), "the request asks for 2 sequences, allowed is 1"),
]


@pytest.mark.parametrize(("tensors", "message"), BAD, ids=[message for _, message in BAD])
def test_what_needs_more_than_one_response_is_refused(server, tensors, message):
    with (
        grpcclient.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match=message),
    ):
        client.infer("ensemble", inputs_of(tensors))
