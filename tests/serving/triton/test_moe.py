"""A mixture of experts in a real Triton server: `price` and a draft model change no text."""

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.profiling.ensure import measure_once
from faser_trtllm.serving.client import GrpcClient
from faser_trtllm.serving.text.offline import generate_all
from tests.support.moe_checkpoints import make_moe_pair
from tests.support.triton_server import Server

pytestmark = [pytest.mark.triton, pytest.mark.slow]

PROMPTS = ["hello world", "def f(x):", "abc " * 30]


@pytest.mark.parametrize("speculation", ["fixed:4", "price"])
def test_a_mixture_answers_with_the_target_s_own_tokens(tmp_path, speculation):
    target, draft = make_moe_pair(tmp_path, num_layers=2)
    sizes = {"max_batch_size": 8, "max_seq_len": 512, "max_draft_len": 4, "tokens_per_block": 16}
    engines = build_engines(BuildOptions(target, draft, tmp_path / "engine", **sizes))
    measure_once(engines.path)
    with open_executor(engines.path, ExecutorConfig(speculation="off")) as executor:
        alone = list(generate_all(executor, engines.path, PROMPTS, {"max_tokens": 40, "end_ids": ()}))
    with Server(engines.path, speculation=speculation, log=tmp_path / "log") as server:
        server.wait_ready()
        with GrpcClient(server.grpc_url) as client:
            for prompt, expected in zip(PROMPTS, alone, strict=True):
                responses = list(client.stream(prompt, max_tokens=40, end_id=-1))
                assert tuple(token for each in responses for token in each.token_ids) == expected.token_ids
                if speculation == "fixed:4":
                    assert responses[-1].num_draft_tokens > 0
