"""Our executor under TensorRT-LLM's schedulers and KV cache manager (generated stand-ins).

Tokens are those of the native scheduler, bit for bit, whatever is paused, chunked, pruned or cancelled.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.config import ContextChunkingPolicy, ExecutorConfig, SchedulerConfig, SchedulerKind
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError, InvalidArgumentError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.executor.stats import StepWatcher
from tests.support.effort import examples
from tests.support.engine_dirs import make_engine_dir
from tests.support.executor_harness import Collector, Setup, run
from tests.support.random_setups import VOCAB, check_early_ends, greedy_reference, prompts, setups
from tests.trtllm import fakes, rules

BATCH_MANAGER = "tensorrt_llm.bindings.internal.batch_manager"
ALGORITHMS = "tensorrt_llm.bindings.internal.algorithms"


pytestmark = pytest.mark.usefixtures("modules")


@settings(max_examples=examples(60))
@given(setup=setups(), data=st.data())
def test_greedy_tokens_are_the_targets_own(setup, data):
    setup = replace(setup, scheduler="trtllm", num_branches=0)
    requests, arrivals = [], []
    for _ in range(data.draw(st.integers(1, 8))):
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 40)),
            end_ids=data.draw(st.sampled_from([(), (2,)])),
            num_draft_tokens=data.draw(st.sampled_from([None, None, 0, 2])),
        )
        requests.append((data.draw(prompts), params))
        arrivals.append(data.draw(st.integers(0, 12)))
    result = run(setup, requests, arrivals)
    for index, (prompt, params) in enumerate(requests):
        room = min(params.max_tokens, setup.max_seq_len - len(prompt))
        expected = greedy_reference(setup.target.table, prompt, room, params.end_ids)
        assert result.tokens[str(index)] == expected
        assert result.reasons[str(index)] == ("length" if len(expected) == room else "stop")


def test_log_probs_of_prompts_are_refused():
    with Setup(scheduler="trtllm").open() as executor:
        with pytest.raises(
            InvalidArgumentError, match="return_context_log_probs was sent, but TensorRT-LLM's scheduler"
        ):
            executor.submit("0", [1, 2], SamplingParams(return_context_log_probs=True), lambda output: False)
        executor.submit("0", [1, 2], SamplingParams(return_log_probs=True, num_top_log_probs=2), lambda output: False)


@settings(max_examples=examples(25))
@given(setup=setups(), data=st.data())
def test_seeded_tokens_are_the_native_schedulers(setup, data):
    requests = []
    for _ in range(data.draw(st.integers(1, 6))):
        seed = data.draw(st.integers(0, 2**64 - 1))
        params = SamplingParams(max_tokens=data.draw(st.integers(1, 30)), temperature=1.0, seed=seed)
        requests.append((data.draw(prompts), params))
    arrivals = [data.draw(st.integers(0, 12)) for _ in requests]
    theirs = run(replace(setup, scheduler="trtllm", num_branches=0), requests, arrivals)
    assert theirs.tokens == run(setup, requests, arrivals).tokens


@settings(max_examples=examples(40))
@given(setup=setups(), data=st.data())
def test_requests_that_end_early_change_nothing_for_the_others(setup, data):
    check_early_ends(replace(setup, scheduler="trtllm", num_branches=0), data)


def busy_setup(**options):
    """Too few blocks for all, chunks, carried and pruned rows, drafts of every length."""
    defaults = {"policy": "erratic", "capacity": "MAX_UTILIZATION", "noise": 0.7, "max_num_tokens": 14}
    return Setup(vocab_size=VOCAB, scheduler="trtllm", num_blocks=18, tokens_per_block=4, **defaults | options)


def busy_requests(seed, count=10):
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, VOCAB, rng.integers(1, 30)).tolist(), SamplingParams(max_tokens=int(rng.integers(8, 30))))
        for _ in range(count)
    ]


def test_busy_runs_see_every_event_and_stay_exact():
    """Counts what happened, so that equal tokens cannot come from nothing having happened."""
    seen = Counter()
    for seed in range(4):
        setup, requests = busy_setup(policy_seed=seed), busy_requests(seed)
        executor, collector = setup.open(), Collector()
        executor.watch(Watcher(seen))
        for index, (prompt, params) in enumerate(requests):
            executor.submit(str(index), prompt, params, collector.sink(str(index)))
        for step in range(3000):
            if step in (12, 25):
                executor.cancel(str(step % 10))
            if not executor.step():
                break
            executor.check_integrity()
        stats = executor.stats()
        assert stats["num_running"] == stats["num_waiting"] == 0
        assert stats["kv_num_free_blocks"] == stats["kv_num_blocks"] == 18
        for index, (prompt, params) in enumerate(requests):
            expected = greedy_reference(setup.target.table, prompt, params.max_tokens)
            tokens = collector.tokens[str(index)]
            if collector.reasons[str(index)] == "cancelled":
                seen["cancelled"] += 1
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
    events = ["accepted", "rejected", "carried", "pruned", "paused", "chunks", "cancelled", "resumed"]
    assert not [event for event in events if seen[event] < 4], dict(seen)


class Watcher(StepWatcher):
    def __init__(self, seen):
        self._seen = seen

    def step(self, record):
        rows, result, n = record.plan.scheduled, record.result, record.plan.scheduled.num_sampled
        self._seen += Counter(
            accepted=record.num_accepted,
            rejected=int((result.num_accepted < rows.num_drafts[:n]).sum()),
            carried=int((result.outcome == native.STILL_PENDING).sum()),
            pruned=record.num_pruned,
            paused=len(record.plan.paused),
            chunks=int((rows.num_new_tokens[n:] > 1).sum()),
            resumed=sum(r.stats.num_preemptions > 0 for r in record.plan.admitted),
        )


def spied(monkeypatch):
    """Stand-ins that note what is added to and taken from sequences, and the draft lengths that are scheduled."""
    calls, lengths = [], []

    class Cache(rules.KVCacheManager):
        def add_token(self, request_id):
            calls.append((request_id, 1))
            super().add_token(request_id)

        def rewind_kv_cache(self, request_id, rewind_lengths):
            calls.append((request_id, -rewind_lengths))
            super().rewind_kv_cache(request_id, rewind_lengths)

    class Capacity(rules.CapacityScheduler):
        def __call__(self, active_requests, *rest):
            lengths.append([r.num_draft_tokens for r in active_requests])
            return super().__call__(active_requests, *rest)

    behaviors = {f"{BATCH_MANAGER}.KVCacheManager": Cache, f"{ALGORITHMS}.CapacityScheduler": Capacity}
    fakes.install(monkeypatch, behaviors=behaviors)
    return calls, lengths


def test_what_is_allocated_and_not_accepted_is_rewound(monkeypatch):
    calls, _ = spied(monkeypatch)
    setup = Setup(vocab_size=VOCAB, scheduler="trtllm", policy="fixed:4", noise=1.5)
    executor, collector = setup.open(), Collector()
    expected = []

    class Steps(StepWatcher):
        def step(self, record):
            for i, item in enumerate(record.plan.scheduled):
                if item.num_drafts or item.request.num_output_tokens > 1:
                    rewound = item.num_drafts - int(record.result.num_accepted[i])
                    expected.append((1 + item.num_drafts, rewound if not item.request.is_finished else 0))

    executor.watch(Steps())
    executor.submit("a", [1, 2, 3], SamplingParams(max_tokens=30), collector.sink("a"))
    seen = []
    while executor.step():
        added = sum(count for _, count in calls if count > 0)
        seen.append((added, -sum(count for _, count in calls if count < 0)))
        calls.clear()
    assert seen[0] == (0, 0), "the context's blocks come with its sequence"
    assert seen[1:] == expected
    assert len({rewound for _, rewound in expected}) > 2, "drafts were accepted and rejected"


def test_each_request_has_its_own_draft_length_when_tensorrt_llm_schedules(monkeypatch):
    _, lengths = spied(monkeypatch)
    setup = Setup(vocab_size=VOCAB, scheduler="trtllm", policy="fixed:4", noise=0.5)
    executor, collector = setup.open(), Collector()
    for name, num_drafts in (("off", 0), ("two", 2), ("all", None)):
        params = SamplingParams(max_tokens=12, num_draft_tokens=num_drafts)
        executor.submit(name, [1, 2, 3], params, collector.sink(name))
    while executor.step():
        pass
    assert lengths[0] == [0, 0, 0], "contexts have no drafts"
    assert lengths[1] == [0, 2, 4]


@pytest.mark.parametrize("chunking", ContextChunkingPolicy)
def test_chunks_are_cut_as_tensorrt_llm_cuts_them(chunking):
    """Two prompts of 30 over passes of 12 rows: one after the other, or both a unit at a time."""
    setup = Setup(vocab_size=VOCAB, scheduler="trtllm", max_num_tokens=12, chunking=chunking.value, max_batch_size=2)
    executor, collector = setup.open(), Collector()
    chunks = []
    executor.watch(Watcher(Counter()))
    watcher = type("Chunks", (Watcher,), {"step": lambda self, record: chunks.append(_rows(record.plan))})
    executor.watch(watcher(Counter()))
    for name in "ab":
        executor.submit(name, [1] * 30, SamplingParams(max_tokens=1), collector.sink(name))
    while executor.step():
        executor.check_integrity()
    alone = [{"a": 12}, {"a": 12}, {"a": 6, "b": 6}, {"b": 12}, {"b": 12}]
    together = [{"a": 6, "b": 6}] * 5
    assert chunks == (together if chunking is ContextChunkingPolicy.EQUAL_PROGRESS else alone)
    assert collector.tokens["a"] == greedy_reference(setup.target.table, [1] * 30, 1)


def _rows(plan):
    return {s.request.request_id: s.num_new_tokens for s in plan.scheduled}


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    return make_engine_dir(tmp_path_factory.mktemp("pair"), max_seq_len=128, max_batch_size=4)


@pytest.mark.parametrize("speculation", ["off", "fixed:3"])
def test_real_engines_give_the_tokens_of_the_native_scheduler(engine_dir, speculation):
    """The CPU engine, greedy and seeded, with two chunks per prompt and a cache for two requests of five."""
    tokens = {}
    for scheduler in SchedulerKind:
        config = ExecutorConfig(
            scheduler=scheduler,
            speculation=speculation,
            max_num_tokens=48,
            kv_cache_config={"max_tokens": 256},
            num_threads=1,
        )
        collector = Collector()
        with open_executor(engine_dir, config) as executor:
            for index in range(5):
                prompt = np.random.default_rng(index).integers(0, 320, 40 + index).tolist()
                params = SamplingParams(max_tokens=20, temperature=float(index % 2), seed=index if index % 2 else None)
                executor.submit(str(index), prompt, params, collector.sink(str(index)))
            while executor.step():
                executor.check_integrity()
        tokens[scheduler] = collector.tokens
    assert tokens[SchedulerKind.TRTLLM] == tokens[SchedulerKind.NATIVE]
    assert all(len(output) == 20 for output in tokens[SchedulerKind.NATIVE].values())


def test_the_native_scheduler_has_one_way_of_chunking(engine_dir):
    config = SchedulerConfig(context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS)
    with pytest.raises(ConfigError, match="context_chunking_policy is EQUAL_PROGRESS, the native scheduler has"):
        open_executor(engine_dir, ExecutorConfig(scheduler_config=config))


def test_a_missing_package_is_told_before_engines_are_opened(monkeypatch, engine_dir):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package tensorrt_llm is missing"):
        open_executor(engine_dir, ExecutorConfig(scheduler=SchedulerKind.TRTLLM))


def test_what_could_not_be_resumed_without_chunking_is_refused():
    setup = busy_setup(max_num_tokens=16, chunked=False)
    executor, collector = setup.open(), Collector()
    executor.submit("fits", [1] * 8, SamplingParams(max_tokens=8), collector.sink("fits"))
    with pytest.raises(InvalidArgumentError, match=r"are 17 tokens, max_num_tokens is 16, and enable_chunked_context"):
        executor.submit("grows", [1] * 8, SamplingParams(max_tokens=9), collector.sink("grows"))
    while executor.step():
        pass
    assert len(collector.tokens["fits"]) == 8
