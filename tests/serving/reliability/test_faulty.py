"""Engines that break on purpose behind a real server: what clients see of it."""

import contextlib
import queue

import pytest

from faser_trtllm.config import ExecutorConfig
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.serving.client import GrpcClient, ResponseError
from faser_trtllm.serving.text.offline import generate_all
from tests.support.engine_dirs import make_engine_dir
from tests.support.triton_server import Server
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.slow]

MAX_SEQ_LEN = 256
MAX_QUEUE_SIZE = 40
PROMPTS = ["hello world", "def f(x):", "naïve 😀"]
GREEDY = {"max_tokens": 40, "end_id": -1}
FAULTS = "draft_error@step5,draft_oom@step60,target_nan@step3000"


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    return make_engine_dir(tmp_path_factory.mktemp("pair"), max_batch_size=8, max_seq_len=MAX_SEQ_LEN, max_draft_len=4)


@pytest.fixture(scope="module")
def server(engine_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    config = directory / "faser.yaml"
    config.write_text(
        f"max_queue_size: {MAX_QUEUE_SIZE}\n"
        f"kv_cache_config: {{max_tokens: {2 * MAX_SEQ_LEN}}}\n"
        "scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}\n"
    )
    environment = {"FASER_FAULT": FAULTS}
    with Server(
        engine_dir, config=config, speculation="fixed:4", environment=environment, log=directory / "log"
    ) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def alone(engine_dir):
    """Greedy text of each prompt by the target alone, in process."""
    with contextlib.closing(open_executor(engine_dir, ExecutorConfig(speculation="off"))) as executor:
        fields = {"max_tokens": GREEDY["max_tokens"], "end_ids": ()}
        answers = generate_all(executor, engine_dir, PROMPTS, fields)
        return {prompt: answer.text for prompt, answer in zip(PROMPTS, answers, strict=True)}


def ask(client, prompt):
    return "".join(response.text for response in client.stream(prompt, **GREEDY))


def fallbacks(server, reason):
    return server.metric(f'faser_spec_fallbacks_total{{model="faser",reason="{reason}"')


def is_off(server, reason):
    return server.metric(f'faser_spec_disabled{{model="faser",reason="{reason}"')


def test_the_log_says_that_faults_are_on(server):
    assert "the draft engine will break on purpose (draft_error@step5, draft_oom@step60)" in server.output()
    assert "the target engine will break on purpose (target_nan@step3000)" in server.output()


def test_a_failing_draft_costs_speed_only_and_is_counted_by_reason(server, alone):
    with GrpcClient(server.grpc_url) as client:
        assert ask(client, PROMPTS[0]) == alone[PROMPTS[0]]
        wait_until(lambda: fallbacks(server, "draft_error") == 1)
        wait_until(lambda: is_off(server, "draft_error") == 1)
        assert is_off(server, "draft_oom") == 0

        def drafts_again():
            """After its rest."""
            *_, final = client.stream(PROMPTS[1], **GREEDY)
            return final.num_draft_tokens > 0

        wait_until(drafts_again, poll_s=0.2)
        wait_until(lambda: is_off(server, "draft_error") == 0)


def test_running_out_of_memory_is_a_reason_of_its_own(server, alone):
    with GrpcClient(server.grpc_url) as client:

        def hits():
            assert ask(client, PROMPTS[2]) == alone[PROMPTS[2]]
            return fallbacks(server, "draft_oom")

        wait_until(hits)
    assert fallbacks(server, "draft_error") == 1


def test_nan_of_the_target_is_internal_for_that_request_only(server, alone):
    """Requests go on beside it; only the first of that pass gets the error."""
    errors, num_good = [], 0
    with GrpcClient(server.grpc_url) as client:
        for _ in range(200):
            prompts = {client.send(prompt, stream=True, **GREEDY): prompt for prompt in PROMPTS}
            texts = dict.fromkeys(prompts, "")
            num_open = len(prompts)
            while num_open:
                try:
                    request_id, response = client.receive(PATIENCE_S)
                except ResponseError as error:
                    errors.append(error)
                    num_open -= 1
                    continue
                texts[request_id] += response.text
                if response.is_final:
                    num_open -= 1
                    num_good += 1
                    assert texts[request_id] == alone[prompts[request_id]]
            if errors:
                break
        (error,) = errors
        assert "NaN or infinite logits" in str(error)
        assert num_good % 3 == 2
        wait_until(lambda: server.metric('faser_request_failures_total{code="INTERNAL"') == 1)
        assert ask(client, PROMPTS[0]) == alone[PROMPTS[0]]


def test_more_than_the_cache_holds_is_preempted_or_waits_and_all_of_it_ends(server):
    """Twelve requests of nearly max_seq_len each, in a cache for two."""
    with GrpcClient(server.grpc_url) as client:
        for i in range(12):
            client.send(f"{i} hello", max_tokens=MAX_SEQ_LEN - 30, end_id=-1)
        finals = [client.receive(PATIENCE_S)[1] for _ in range(12)]
    assert {final.finish_reason for final in finals} == {"length"}
    assert {final.num_output_tokens for final in finals} == {MAX_SEQ_LEN - 30}
    wait_until(lambda: server.metric("faser_num_preemptions_total") > 0)


def test_a_full_queue_is_unavailable_and_the_rest_is_served(server):
    with GrpcClient(server.grpc_url) as client:
        for i in range(3 * MAX_QUEUE_SIZE):
            client.send(f"{i} hello", max_tokens=60, end_id=-1)
        num_served, refusals = 0, []
        for _ in range(3 * MAX_QUEUE_SIZE):
            try:
                num_served += client.receive(PATIENCE_S)[1].is_final
            except ResponseError as error:
                refusals.append(str(error))
        with pytest.raises(queue.Empty):
            client.receive(0.1)
    assert num_served >= MAX_QUEUE_SIZE
    assert refusals
    words = f"Maximum queue size of {MAX_QUEUE_SIZE} has been reached, please try again later"  # TensorRT-LLM's
    assert all(words in text for text in refusals)
