"""Responses that the backend sends from a thread of their own: whole, in order, and the last one ends its request."""

import contextlib

import numpy as np
import pytest

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.serving.client import GrpcClient
from faser_trtllm.serving.text.request import TextRequest
from faser_trtllm.serving.text.service import TextGenerator
from tests.serving.triton.contract_clients import end_to_end_inputs, send, succeed
from tests.support.engine_dirs import make_engine_dir
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.triton, pytest.mark.slow]

NUM_TOKENS = 300  # logits of 320 entries each: 375 KiB, above kLargeBytes of plugins/triton/wire.h


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    sizes = {"max_batch_size": 8, "max_seq_len": 512, "max_draft_len": 4, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), **sizes)


@pytest.fixture(scope="module")
def server(engine_dir, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(engine_dir, speculation="fixed:4", models=("faser", "ensemble"), log=log) as server:
        yield server.wait_ready()


def logits_alone(engine_dir, prompt):
    with contextlib.closing(open_executor(engine_dir, ExecutorConfig(speculation="off"))) as executor:
        generator = TextGenerator(executor, Tokenizer.load(EngineDir.load(engine_dir).tokenizer_dir))
        outputs, fields = [], {"stream": False, "end_ids": (), "return_generation_logits": True}
        generator.submit("alone", TextRequest(text=prompt, max_tokens=NUM_TOKENS, **fields), outputs.append)
        while not outputs:
            assert executor.step()
        return outputs[-1].logits


def test_they_are_whole_next_to_a_stream_and_the_last_ends_the_request(server, engine_dir):
    expected = logits_alone(engine_dir, "hello")
    more = {
        "return_generation_logits": np.array([[True]], bool),
        "num_return_sequences": np.array([[3]], np.int32),
        "end_id": np.array([[-1]], np.int32),
    }
    with GrpcClient(server.grpc_url) as client:
        client.send("def f(x):", max_tokens=200, stream=True, end_id=-1)
        results = succeed(
            send(server, "ensemble", end_to_end_inputs("hello", NUM_TOKENS, **more), ["generation_logits"])
        )
        num_tokens = 0
        while num_tokens < 200:
            num_tokens += len(client.receive(PATIENCE_S)[1].token_ids)
    assert [result.as_numpy("generation_logits").tobytes() == expected for result in results] == [True] * 3
