"""A mixture of experts in a real Triton server: `price` and a draft model change no text."""

from unittest import mock

import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.profiling import profile
from faser_trtllm.profiling.ensure import measure_once
from faser_trtllm.serving.client import GrpcClient
from faser_trtllm.serving.text.offline import generate_all
from tests.support.moe_checkpoints import make_moe_pair
from tests.support.triton_server import Server

pytestmark = [pytest.mark.triton, pytest.mark.slow]

PROMPTS = ["hello world", "def f(x):", "abc " * 30]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    """Profiled, for `price`."""
    directory = tmp_path_factory.mktemp("mixture")
    target, draft = make_moe_pair(directory, num_layers=2)
    sizes = {"max_batch_size": 8, "max_seq_len": 512, "max_draft_len": 4, "tokens_per_block": 16}
    build_engines(BuildOptions(target, draft, directory / "engine", **sizes))
    with mock.patch.object(profile, "QUICK_BUDGET_S", 0.05):
        measure_once(directory / "engine")
    return directory / "engine"


@pytest.fixture(scope="module")
def alone(engine_dir):
    """The target's own answer to each prompt."""
    with open_executor(engine_dir, ExecutorConfig(speculation="off")) as executor:
        return list(generate_all(executor, engine_dir, PROMPTS, {"max_tokens": 40, "end_ids": ()}))


@pytest.mark.parametrize("speculation", ["fixed:4", "price"])
def test_a_mixture_answers_with_the_target_s_own_tokens(engine_dir, alone, tmp_path, speculation):
    with Server(engine_dir, speculation=speculation, log=tmp_path / "log") as server:
        server.wait_ready()
        with GrpcClient(server.grpc_url) as client:
            for prompt, expected in zip(PROMPTS, alone, strict=True):
                responses = list(client.stream(prompt, max_tokens=40, end_id=-1))
                assert tuple(token for each in responses for token in each.token_ids) == expected.token_ids
                if speculation == "fixed:4":
                    assert responses[-1].num_draft_tokens > 0
