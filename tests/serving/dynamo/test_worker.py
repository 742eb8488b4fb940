"""The engine for NVIDIA Dynamo, over real CPU engines: with Dynamo's packages where they are, else with a recording.

With them: an environment of its own with ai-dynamo and ai-dynamo-runtime 1.6.0, as docs/integrations.md describes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from faser_trtllm.config import ExecutorConfig
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.serving.dynamo.request import read_params, read_token_ids
from faser_trtllm.serving.text.offline import generate_all
from tests.serving.dynamo import surface as dynamo_surface
from tests.support.engine_dirs import make_engine_dir
from tests.support.waiting import PATIENCE_S

MAX_SEQ_LEN = 256
PROMPTS = ["hello world", "def f(x):", "abc " * 20]
GREEDY = {"sampling_options": {"temperature": 0.0}, "stop_conditions": {"max_tokens": 40, "ignore_eos": True}}


@pytest.fixture(scope="module")
def adapter():
    """The adapter's module, with Dynamo or the recording under it."""
    if dynamo_surface.IS_INSTALLED:
        yield importlib.import_module("faser_trtllm.serving.dynamo.worker")
        return
    names = dynamo_surface.install()
    yield importlib.import_module("faser_trtllm.serving.dynamo.worker")
    for name in [*names, "faser_trtllm.serving.dynamo.worker"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    sizes = {"max_batch_size": 8, "max_seq_len": MAX_SEQ_LEN, "max_draft_len": 4, "tokens_per_block": 16}
    return make_engine_dir(tmp_path_factory.mktemp("pair"), **sizes)


@pytest.fixture(scope="module")
def alone(engine_dir):
    """(prompt ids, output ids) of the target alone, greedy."""
    from faser_trtllm.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(engine_dir)
    with contextlib.closing(open_executor(engine_dir, ExecutorConfig(speculation="off"))) as executor:
        answers = generate_all(executor, engine_dir, PROMPTS, {"max_tokens": 40, "end_ids": ()})
        return [
            (tokenizer.encode(prompt), list(answer.token_ids)) for prompt, answer in zip(PROMPTS, answers, strict=True)
        ]


class Context:
    """The part of Dynamo's Context that the adapter uses."""

    def __init__(self, name="request", is_stopped=False):
        self._name, self._is_stopped = name, is_stopped

    def id(self):
        return self._name

    def is_stopped(self):
        return self._is_stopped


def run(adapter, engine_dir, scenario, *flags):
    """Start an engine, run the coroutine scenario(engine, config), and clean up."""

    async def work():
        argv = ["--engine_dir", str(engine_dir), "--model_path", str(engine_dir), "--speculation", "fixed:4", *flags]
        engine, _ = await adapter.FaserEngine.from_args([*argv, "--drain_timeout_s", "0.2"])
        try:
            return await scenario(engine, await engine.start(7))
        finally:
            await engine.cleanup()
            await engine.cleanup()

    return asyncio.run(work())


def ask(adapter, engine_dir, request):
    """One request of an engine of its own -> tokens, chunks."""
    return run(adapter, engine_dir, lambda engine, config: collect(engine, request))


async def collect(engine, request, context=None):
    chunks = [chunk async for chunk in engine.generate(request, context or Context())]
    assert all("finish_reason" not in chunk for chunk in chunks[:-1])
    assert all(chunk["index"] == 0 for chunk in chunks)
    return [token for chunk in chunks for token in chunk["token_ids"]], chunks


def test_the_recorded_surface_is_dynamo_s(adapter):
    if not dynamo_surface.IS_INSTALLED:
        pytest.skip("ai-dynamo is not installed")
    import dynamo.common.backend as backend
    from dynamo.common.backend import publisher
    from dynamo.llm import exceptions

    assert set(backend.LLMEngine.__abstractmethods__) == dynamo_surface.ABSTRACT_METHODS
    assert all(hasattr(backend.LLMEngine, name) for name in dynamo_surface.OPTIONAL_METHODS)
    for ours, theirs in (
        (dynamo_surface.EngineConfig, backend.EngineConfig),
        (dynamo_surface.LlmRegistration, backend.LlmRegistration),
        (dynamo_surface.WorkerConfig, backend.WorkerConfig),
        (dynamo_surface.PushSource, publisher.PushSource),
        (dynamo_surface.ComponentSnapshot, publisher.ComponentSnapshot),
    ):
        real = {f.name: f for f in dataclasses.fields(theirs)}
        for recorded in dataclasses.fields(ours):
            assert real[recorded.name].default == recorded.default, (theirs, recorded.name)
    assert all(issubclass(getattr(exceptions, name), Exception) for name in dynamo_surface.EXCEPTIONS)


def test_it_is_a_whole_engine(adapter):
    engine = adapter.FaserEngine
    assert not getattr(engine, "__abstractmethods__", None)
    assert set(vars(engine)) >= dynamo_surface.OPTIONAL_METHODS
    assert inspect.isasyncgenfunction(engine.generate)


def test_registration(adapter, engine_dir):
    async def scenario(engine, config):
        _, worker = await engine.from_args(
            ["--engine_dir", "e", "--model_path", "/m", "--served_model_name", "x", "--disable_kv_routing"]
        )
        return config, worker, await engine.health_check_payload(), await engine.kv_event_sources()

    config, worker, payload, sources = run(adapter, engine_dir, scenario, "--served_model_name", "demo")
    assert (config.model, config.served_model_name) == (str(engine_dir), "demo")
    assert config.llm.context_length == MAX_SEQ_LEN
    assert (config.llm.kv_cache_block_size, config.llm.total_kv_blocks) == (16, 8 * MAX_SEQ_LEN // 16)
    assert (config.llm.max_num_seqs, config.llm.max_num_batched_tokens) == (8, 2048)
    assert (worker.model_name, worker.served_model_name, worker.enable_kv_routing) == ("/m", "x", False)
    assert payload["stop_conditions"]["max_tokens"] == 1
    assert [source.dp_rank for source in sources] == [0]


def test_tokens_are_the_target_s_own_in_one_chunk_per_step(adapter, engine_dir, alone):
    async def scenario(engine, config):
        return await asyncio.gather(
            *(
                collect(engine, {"token_ids": prompt, **GREEDY}, Context(str(i)))
                for i, (prompt, _) in enumerate(alone * 4)
            )
        )

    for (tokens, chunks), (prompt, expected) in zip(run(adapter, engine_dir, scenario), alone * 4, strict=True):
        assert tokens == expected
        final = chunks[-1]
        assert final["finish_reason"] == "length"
        assert final["completion_usage"]["prompt_tokens"] == len(prompt)
        assert final["completion_usage"]["completion_tokens"] == 40
        assert final["completion_usage"]["total_tokens"] == len(prompt) + 40
        assert 0 < final["engine_data"]["num_accepted_tokens"] <= final["engine_data"]["num_draft_tokens"]
        assert len(chunks) < 40


def test_drafts_may_be_turned_off_and_prompts_come_as_bytes(adapter, engine_dir, alone):
    prompt, expected = alone[0]
    request = {"token_ids": np.array(prompt, "<i4").tobytes(), "extra_args": {"num_draft_tokens": 0}, **GREEDY}
    tokens, chunks = ask(adapter, engine_dir, request)
    assert tokens == expected
    assert chunks[-1]["engine_data"] == {"num_draft_tokens": 0, "num_accepted_tokens": 0}


def test_log_probs_and_stop_tokens(adapter, engine_dir, alone):
    prompt, expected = alone[1]
    stop = next(token for i, token in enumerate(expected) if i > 5 and token not in expected[:i])
    conditions = {"max_tokens": 40, "stop_token_ids_hidden": [stop]}
    request = {"token_ids": prompt, **GREEDY, "stop_conditions": conditions, "output_options": {"logprobs": 1}}
    tokens, chunks = ask(adapter, engine_dir, request)
    assert tokens == expected[: expected.index(stop)]
    assert chunks[-1]["finish_reason"] == "stop"
    log_probs = [value for chunk in chunks for value in chunk.get("log_probs", ())]
    assert len(log_probs) == len(tokens)
    assert all(value <= 0.0 for value in log_probs)


@pytest.mark.parametrize("how", ["abort", "stopped before", "left"])
def test_requests_end_when_nobody_wants_them(adapter, engine_dir, how):
    request = {"token_ids": [5, 6, 7], "stop_conditions": {"max_tokens": 250, "ignore_eos": True}}

    async def scenario(engine, config):
        context = Context("x", is_stopped=how == "stopped before")
        stream = engine.generate(request, context)
        reasons = []
        async for chunk in stream:
            reasons.append(chunk.get("finish_reason"))
            if how == "left":
                break
            if how == "abort":
                await engine.abort(context)
        await stream.aclose()
        for _ in range(500):
            stats = engine._executor.stats()
            if stats["num_running"] == stats["num_waiting"] == 0:
                break
            await asyncio.sleep(0.01)
        return reasons[-1], stats, engine._open

    reason, stats, left = run(adapter, engine_dir, scenario)
    assert reason == (None if how == "left" else "cancelled")
    assert (stats["num_running"], stats["num_waiting"], left) == (0, 0, {})
    assert stats["kv_num_free_blocks"] == stats["kv_num_blocks"]


def test_cleanup_ends_what_still_runs(adapter, engine_dir):
    request = {"token_ids": [5, 6, 7], "stop_conditions": {"max_tokens": 252, "ignore_eos": True}}

    async def scenario(engine, config):
        streams = [asyncio.create_task(collect(engine, request, Context(str(i)))) for i in range(40)]
        await asyncio.sleep(0.05)
        engine._options = dataclasses.replace(engine._options, drain_timeout_s=0.0)
        await engine.cleanup()
        with pytest.raises(adapter.WorkerUnavailable, match="not running"):
            await collect(engine, request)
        return [chunks[-1]["finish_reason"] for _, chunks in await asyncio.gather(*streams)]

    reasons = run(adapter, engine_dir, scenario)
    assert "cancelled" in reasons
    assert set(reasons) <= {"cancelled", "length"}


class Publisher:
    """A stand-in for Dynamo's KvEventPublisher and SnapshotPublisher."""

    def __init__(self):
        self.blocks, self.removed, self.loads = {}, [], []
        self.has_load = threading.Event()

    def publish_stored(self, token_ids, num_block_tokens, block_hashes, parent_hash=None):
        assert num_block_tokens == [len(token_ids)]
        assert parent_hash is None or parent_hash in self.blocks
        (block,) = block_hashes
        self.blocks[block] = (parent_hash, token_ids)

    def publish_removed(self, block_hashes):
        self.removed += block_hashes

    def publish(self, rank, snapshot):
        self.loads.append((rank, snapshot))
        self.has_load.set()


def test_the_router_learns_prefixes_and_load(adapter, engine_dir):
    publisher = Publisher()
    prompts = [[number] * 100 for number in range(2, 2 + 30)]  # far more than the cache holds

    async def scenario(engine, config):
        (source,) = await engine.kv_event_sources()
        assert engine.component_metrics_dp_ranks() == [0]
        engine.attach_snapshot_publisher(publisher)
        source.on_ready(publisher)
        for prompt in prompts:
            await collect(engine, {"token_ids": prompt, **GREEDY})
        await asyncio.to_thread(publisher.has_load.wait, PATIENCE_S)

    run(adapter, engine_dir, scenario)
    firsts = [tokens for parent, tokens in publisher.blocks.values() if parent is None]
    assert [tokens[0] for tokens in firsts] == list(range(2, 32))
    chained = [tokens for parent, tokens in publisher.blocks.values() if parent is not None]
    assert len(chained) >= 30 * 5  # six whole blocks of a prompt of 100
    assert len(publisher.removed) == len(set(publisher.removed)) > 0
    assert set(publisher.removed) <= set(publisher.blocks)
    rank, load = publisher.loads[-1]
    assert (rank, load.kv_total_blocks) == (0, 128)
    assert 0 <= load.kv_used_blocks <= 128


BAD = [
    ({"token_ids": []}, "the prompt is empty"),
    ({"token_ids": [1] * MAX_SEQ_LEN}, "the prompt has 256 tokens"),
    ({"token_ids": [320]}, "token id 320"),
    ({"token_ids": b"abc"}, "token_ids has 3 bytes"),
    ({"token_ids": 5}, "token_ids is 5; it must be a list of token ids"),
    ({"eos_token_ids": 5}, "eos_token_ids is 5; it must be a list of token ids"),
    ({"stop_conditions": {"stop_token_ids": ["a", 1]}}, "stop_token_ids is ['a', 1]; it must be a list of token ids"),
    ({"sampling_options": {"logit_bias": {"": 1}}}, "logit_bias is {'': 1}; it must map token ids to numbers"),
    ({"output_options": {"logprobs": "all"}}, "logprobs all, allowed are 0 and 1"),
    ({"sampling_options": {"temperature": -1.0}}, "temperature is -1.0"),
    ({"sampling_options": {"n": 2}}, "n 2, which is not supported"),
    ({"sampling_options": {"guided_decoding": {"json": {}}}}, "guided_decoding"),
    ({"sampling_options": 3}, "sampling_options is 3; it must be an object"),
    ({"stop_conditions": {"max_tokens": 0}}, "max_tokens is 0"),
    ({"output_options": {"logprobs": 5}}, "logprobs 5, allowed are 0 and 1"),
    ({"output_options": {"prompt_logprobs": 0}}, "prompt_logprobs"),
    ({"prefill_result": {"a": 1}}, "prefill_result was sent"),
    ({"multi_modal_data": {"a": 1}}, "multi_modal_data was sent"),
]


def test_what_cannot_be_is_dynamo_s_invalid_argument(adapter, engine_dir):
    async def scenario(engine, config):
        for fields, message in BAD:
            with pytest.raises(adapter.InvalidArgument) as caught:
                await collect(engine, {"token_ids": [1], **fields})
            assert message in str(caught.value), fields
        return engine._open

    assert run(adapter, engine_dir, scenario) == {}


def test_a_start_that_fails_can_be_cleaned_up(adapter, tmp_path):
    async def scenario(engine, config):
        raise AssertionError("it started")

    with pytest.raises(Exception, match=r"manifest\.json"):
        run(adapter, tmp_path, scenario)


def test_defaults_and_spellings_of_a_request():
    params = read_params({"token_ids": [1, 2, 3]}, 100, (7,))
    assert (params.temperature, params.max_tokens, params.end_ids, params.seed) == (1.0, 97, (7,), None)
    request = {
        "token_ids": [1],
        "sampling_options": {"top_k": -1, "top_p": 0.9, "seed": 3, "n": 1, "logit_bias": {"5": 2}, "min_p": None},
        "stop_conditions": {"stop": ["x"], "stop_token_ids": [9], "stop_token_ids_hidden": [4], "min_tokens": None},
        "eos_token_ids": [5],
        "output_options": {"logprobs": None, "skip_special_tokens": True},
        "extra_args": None,
    }
    params = read_params(request, 100, (7,))
    assert (params.top_k, params.top_p, params.seed, params.logit_bias) == (0, 0.9, 3, ((5, 2.0),))
    assert (params.end_ids, params.min_tokens, params.return_log_probs) == ((4, 5, 7, 9), 0, False)
    request["stop_conditions"]["ignore_eos"] = True
    assert read_params(request, 100, (7,)).end_ids == (9,)
    with pytest.raises(InvalidArgumentError, match="best_of 4"):
        read_params({"token_ids": [1], "sampling_options": {"best_of": 4}}, 100, ())
    assert read_token_ids(SimpleNamespace(get=lambda name: range(3))) == [0, 1, 2]
