"""Drafting inside TensorRT-LLM, over the generated stand-ins: right drafts whatever happens to requests and batches."""

from __future__ import annotations

import pickle
import random
import re
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.cuda.open import open_cuda_draft
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.trtllm import drafter as drafter_module
from faser_trtllm.trtllm.drafter import DrafterOptions, OpenedDrafter, check_drafter
from faser_trtllm.trtllm.drafter_core import Asked, DraftCore
from lab.clock import ManualClock
from lab.trtllm_check.api_surface import load_entries
from tests.engine.cuda.harness import build_pair
from tests.engine.cuda.host_executor import HostGpu
from tests.support.effort import examples
from tests.support.engine_dirs import make_engine_dir
from tests.support.executor_harness import Collector, toy_costs
from tests.support.toy_engine import ToyEngine, blend, context_row, make_table
from tests.trtllm.py_executor import PyExecutor, install, resource_manager

VOCAB, MAX_DRAFT_LEN, MAX_BATCH_SIZE, MAX_SEQ_LEN = 5, 3, 4, 64
TARGET = make_table(VOCAB, 0)


def greedy(table, tokens, count):
    """The next tokens of a table model."""
    tokens, start = list(tokens), len(tokens)
    while len(tokens) < start + count:
        tokens.append(int(np.argmax(table[context_row(tokens, len(tokens) - 1, VOCAB)])))
    return tokens[start:]


class TimedEngine(ToyEngine):
    """A pass takes as long as toy_costs says."""

    def __init__(self, clock, *args, **sizes):
        super().__init__(*args, **sizes)
        self._clock = clock
        self.rows = {}  # whether in the caller's thread -> rows of each pass

    def forward(self, batch):
        self.rows.setdefault(threading.current_thread() is threading.main_thread(), []).append(batch.num_rows)
        self._clock.advance(1e-4 * _stairs(batch.num_rows))
        return super().forward(batch)


def _stairs(num_rows):
    return 1.0 + 0.5 * ((num_rows - 1) // 4)


class CoreDrafter:
    """DraftCore where TensorRT-LLM asks: what FaserDrafter does, over a toy engine. Time is that of toy_costs."""

    def __init__(self, noise=1.0, policy="fixed:3", draft_ahead=True, max_num_tokens=64, max_seq_len=MAX_SEQ_LEN):
        self.table = blend(TARGET, 1, noise)
        self.clock = ManualClock()
        self.engine = TimedEngine(
            self.clock,
            self.table,
            num_blocks=MAX_BATCH_SIZE * -(-max_seq_len // 4),
            tokens_per_block=4,
            max_batch_size=MAX_BATCH_SIZE,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
        )
        self._num_rows = 1
        self.policy = make_policy(policy, MAX_DRAFT_LEN, toy_costs(), MAX_BATCH_SIZE)
        self.core = DraftCore(
            self.engine, self.policy, self.clock, max_draft_len=MAX_DRAFT_LEN, draft_ahead=draft_ahead
        )

    def prepare_draft_tokens(self, scheduled_requests):
        self.clock.advance(1e-3 * _stairs(self._num_rows))  # the target's pass
        asked = list(map(drafter_module._asked, scheduled_requests.generation_requests))
        coming = list(map(drafter_module._asked, scheduled_requests.context_requests))
        proposals = self.core.propose(asked, coming)
        for request, proposal in zip(scheduled_requests.generation_requests, proposals, strict=True):
            request.py_draft_tokens = proposal
        self._num_rows = sum(1 + len(request.py_draft_tokens) for request in scheduled_requests.generation_requests)

    def pad_draft_tokens_for_cuda_graph(self, scheduled_requests):
        for request in scheduled_requests.generation_requests:
            request.py_draft_tokens.extend([0] * (MAX_DRAFT_LEN - len(request.py_draft_tokens)))


def make_executor(modules, drafter, **options):
    return PyExecutor(modules, drafter, lambda tokens: greedy(TARGET, tokens, 1)[0], MAX_DRAFT_LEN, **options)


POLICIES = ["fixed:3", "fixed:1", "schedule:1=3,3=1", "gp_lcb", "schedule", "price", "off"]


@settings(max_examples=examples(60))
@given(
    noise=st.sampled_from([0.0, 0.7, 3.0]),
    policy=st.sampled_from(POLICIES),
    draft_ahead=st.booleans(),
    max_num_tokens=st.sampled_from([8, 64]),
    seed=st.integers(0, 1000),
)
def test_drafts_are_the_draft_models_own_and_outputs_the_targets(
    modules, noise, policy, draft_ahead, max_num_tokens, seed
):
    """Requests come, rest, are cancelled, end, and use ids again; more of them than the drafter has slots."""
    rng = random.Random(seed)
    drafter = CoreDrafter(noise, policy, draft_ahead, max_num_tokens)
    executor = make_executor(modules, drafter, is_resting=lambda request, step: rng.random() < 0.2)
    prompts = {}
    for step in range(60):
        if rng.random() < 0.25:
            request_id = rng.randrange(8)
            if all(request.py_request_id != request_id for request in executor.active):
                prompts[request_id] = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], rng.randint(1, 25)
                executor.submit(request_id, *prompts[request_id])
        if rng.random() < 0.05 and executor.active:
            executor.cancel(rng.choice(executor.active).py_request_id)
        executor.step()
        if step == 30:
            drafter.core.propose([])  # a step of prompts only
    drafter.core.close()
    for request_id, (prompt, _) in prompts.items():
        output = executor.outputs[request_id]
        assert output == greedy(TARGET, prompt, len(output))
    for tokens, proposal in executor.proposals:
        assert proposal == greedy(drafter.table, tokens, len(proposal))
    if policy == "off":
        assert not any(proposal for _, proposal in executor.proposals)


def run_four(modules, drafter):
    executor = make_executor(modules, drafter)
    for i in range(4):
        executor.submit(i, [i, i + 1, 0], 40)
    executor.run()
    drafter.core.close()
    return executor


@pytest.mark.parametrize("draft_ahead", [False, True])
def test_a_draft_that_is_always_right_saves_three_quarters_of_the_steps(modules, draft_ahead):
    drafter = CoreDrafter(noise=0.0, draft_ahead=draft_ahead)
    executor = run_four(modules, drafter)
    assert executor.step_number == 1 + -(-39 // (MAX_DRAFT_LEN + 1))
    assert (drafter.core.num_reused_drafts > 0) == draft_ahead
    assert drafter.core.num_dropped_drafts == 0


def test_what_was_drafted_ahead_is_dropped_after_a_rejection(modules):
    drafter = CoreDrafter(noise=3.0)
    executor = run_four(modules, drafter)
    assert drafter.core.num_dropped_drafts > 0
    assert all(proposal == greedy(drafter.table, tokens, len(proposal)) for tokens, proposal in executor.proposals)


@pytest.mark.parametrize("draft_ahead", [False, True])
def test_prompts_are_read_while_the_target_reads_them(modules, draft_ahead):
    drafter = CoreDrafter(noise=0.0, draft_ahead=draft_ahead)
    executor = make_executor(modules, drafter)
    executor.submit(1, [1, 2] * 12, 9)
    executor.run()
    drafter.core.close()
    by_caller, beside = (drafter.engine.rows.get(is_main, [0]) for is_main in (True, False))
    assert (max(by_caller) < 4, max(beside) == 24) == (draft_ahead, draft_ahead)
    assert executor.num_accepted > 0


def test_lengths_follow_what_is_accepted(modules):
    """Drafts that are always right grow long, and drafts that never are end; of each the policy is told afterwards."""

    def drafted(is_right):
        drafter = CoreDrafter(noise=0.0, policy="price", max_seq_len=1200)

        def next_token(tokens):
            right = greedy(TARGET, tokens, 1)[0]
            return right if is_right else (right + 1) % VOCAB

        executor = PyExecutor(modules, drafter, next_token, MAX_DRAFT_LEN)
        for i in range(3):
            executor.submit(i, [i, i, 2], 900)
        for _ in range(200):
            executor.step()
        drafter.core.close()
        return [sum(executor.lengths[i][-100:]) for i in range(3)]

    right, wrong = drafted(True), drafted(False)
    assert min(right) > 150
    assert max(wrong) < 0.5 * min(right), (right, wrong)


def test_the_policy_is_told_how_many_tokens_came(modules, monkeypatch):
    """It compares its plans by that count."""
    drafter, told = CoreDrafter(noise=0.7), []
    monkeypatch.setattr(drafter.policy, "observe", told.append)
    run_four(modules, drafter)
    assert len(told) > 5
    for stats in told:
        assert stats.num_steps == 1
        assert stats.num_accepted + stats.num_requests >= stats.num_tokens >= stats.num_requests
        assert stats.num_rows == stats.num_requests + stats.num_verified


def test_room_and_limits_are_kept(modules):
    drafter = CoreDrafter(noise=0.0)
    asked = [Asked(1, [1, 2, 3], 10, 2), Asked(2, [1, 2], 10, 0), Asked(3, [4] * 60, 10, 3), Asked(4, [99], 10, 3)]
    first, second, long, foreign = drafter.core.propose(asked)
    assert len(first) == 2  # its executor has room for two
    assert second == long == foreign == []  # no room; too long for the draft model; not its vocabulary
    last = drafter.core.propose([Asked(1, [1, 2, 3, *greedy(TARGET, [1, 2, 3], 8)], 2, 3)])[0]
    assert len(last) <= 1  # one token is left behind the target's own
    drafter.core.propose([Asked(5, [1, 2, 4], 30, 3)])
    slow = [1, 2, 4, *greedy(TARGET, [1, 2, 4], 1)]  # less was accepted than agrees
    assert drafter.core.propose([Asked(5, slow, 29, 3)]) == [greedy(TARGET, slow, 3)]
    many = drafter.core.propose([Asked(i, [1, i % VOCAB], 10, 3) for i in range(10, 17)])
    assert [bool(proposal) for proposal in many] == [True] * MAX_BATCH_SIZE + [False] * 3
    drafter.core.close()


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    return make_engine_dir(tmp_path_factory.mktemp("pair"), max_batch_size=4, max_num_tokens=64, max_seq_len=160)


def forget_classes():
    for name in ("FaserDrafter", "FaserResources"):
        vars(drafter_module).pop(name, None)


@pytest.fixture
def drafter_class(monkeypatch):
    """FaserDrafter over fresh stand-ins."""
    forget_classes()
    modules = install(monkeypatch)
    yield drafter_module.FaserDrafter, modules
    forget_classes()


VERSIONS = ["1.2.1", "1.3.0rc22", "1.4.0rc1"]


@pytest.fixture(params=VERSIONS)
def any_drafter_class(monkeypatch, request):
    """The same over the stand-ins of each release."""
    forget_classes()
    modules = install(monkeypatch, version=request.param)
    yield drafter_module.FaserDrafter, modules
    forget_classes()


def target_alone(engine_dir, prompts, max_tokens):
    collector = Collector()
    with open_executor(engine_dir, ExecutorConfig(speculation="off")) as executor:
        for i, prompt in enumerate(prompts):
            executor.submit(str(i), prompt, SamplingParams(max_tokens=max_tokens), collector.sink(str(i)))
        while executor.step():
            pass
    return [collector.tokens[str(i)] for i in range(len(prompts))]


def test_faser_drafter_over_a_real_draft_engine_gives_the_targets_text(any_drafter_class, engine_dir):
    """On each release: with the configuration of the drafter, pickled as TensorRT-LLM pickles it, ends reported."""
    make, modules = any_drafter_class
    prompts = [[i + 3, i + 5, i + 7] for i in range(3)]
    texts = target_alone(engine_dir, prompts, 60)
    known = {tuple(prompt): prompt + text for prompt, text in zip(prompts, texts, strict=True)}
    made = make(engine_dir, max_draft_len=4, num_threads=1).decoding_config()
    drafter, resources = pickle.loads(pickle.dumps((made.drafter, made.resource_manager)))
    manager = resource_manager(modules, resources)
    rng = random.Random(1)
    executor = PyExecutor(
        modules,
        drafter,
        lambda tokens: known[tuple(tokens[:3])][len(tokens)],
        4,
        resources=manager,
        is_resting=lambda *_: rng.random() < 0.2,
    )
    for i, prompt in enumerate(prompts):
        executor.submit(i, prompt, 59)  # the known texts end there
    executor.run()
    assert [executor.outputs[i] for i in range(3)] == [text[:59] for text in texts]
    assert any(proposal for _, proposal in executor.proposals)
    assert resources.get_max_resource_count() == 4
    resources.shutdown()


def small_executor(modules, drafter, max_draft_len, resources=None, **options):
    """A target that counts upwards."""
    return PyExecutor(
        modules, drafter, lambda tokens: (tokens[-1] + 1) % VOCAB, max_draft_len, resources=resources, **options
    )


@pytest.mark.parametrize("size", ["tp_size", "pp_size", "cp_size"])
def test_more_than_one_gpu_is_refused_when_it_is_first_asked(any_drafter_class, engine_dir, size):
    make, modules = any_drafter_class
    drafter = make(engine_dir, max_draft_len=3, num_threads=1)
    executor = small_executor(modules, drafter, 3, resource_manager(modules, **{size: 2}))
    executor.submit(1, [1, 2], 10)
    with pytest.raises(ConfigError, match=r"_parallel_size is 2, and FaserDrafter would draft in each .* set"):
        executor.run()


@pytest.mark.parametrize(("configured", "refused"), [(2, True), (3, False), (5, True)])
def test_another_max_draft_len_in_the_configuration_is_refused(drafter_class, engine_dir, configured, refused):
    make, modules = drafter_class
    drafter = make(engine_dir, max_draft_len=3, num_threads=1)
    executor = small_executor(modules, drafter, configured, resource_manager(modules))
    executor.submit(1, [1, 2], 10)
    if refused:
        with pytest.raises(ConfigError, match=f"drafter is 3, that of speculative_config is {configured}"):
            executor.run()
    else:
        executor.run()
    drafter.shutdown()


def test_the_configuration_has_the_drafters_numbers(any_drafter_class, engine_dir):
    make, _ = any_drafter_class
    drafter = make(engine_dir, max_draft_len=3, max_concurrency=2)
    config = drafter.decoding_config(max_draft_len=3)
    assert (config.drafter, config.max_draft_len, config.max_concurrency) == (drafter, 3, 2)
    assert (drafter.max_concurrency, drafter.draft_len_schedule) == (2, None)
    with pytest.raises(ConfigError, match=r"^max_draft_len is 4, the drafter's is 3; give both the same$"):
        drafter.decoding_config(max_draft_len=4)


def test_max_concurrency_and_the_schedule_reach_tensorrt_llm(drafter_class, engine_dir):
    """Release 1.2 sets lengths by active requests, with none beyond the limit; requests without drafts stay so."""
    make, modules = drafter_class
    options = {"max_concurrency": 3, "draft_len_schedule": {2: 1, 1: 3}}
    drafter = make(engine_dir, max_draft_len=3, num_threads=1, **options)
    assert list(drafter.draft_len_schedule) == [1, 2]
    executor = small_executor(modules, drafter, 3, resource_manager(modules))
    for i in range(4):
        executor.submit(i, [1, i], 8 + 30 * (i == 3))
    executor.run()
    assert not any(proposal for _, proposal in executor.proposals), "four were active, and are not drafted for again"
    for i in range(4, 6):
        executor.submit(i, [1, i % VOCAB], 9 + 20 * (i == 5))
    executor.run()
    drafter.shutdown()
    assert max(executor.lengths[4]) == 1
    assert max(executor.lengths[5]) == 3


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_a_schedule_whose_keys_changed_their_meaning_is_refused(monkeypatch, engine_dir, version):
    forget_classes()
    install(monkeypatch, version=version)
    with pytest.raises(ConfigError, match=rf"its keys mean something else since {version[:3]}; write speculation="):
        drafter_module.FaserDrafter(engine_dir, max_draft_len=3, draft_len_schedule={1: 3})
    forget_classes()


def test_rows_of_padding_are_booked_where_the_kv_cache_manager_books_rows(any_drafter_class, engine_dir):
    """Requests beyond max_concurrency keep no room for drafts, and are padded all the same once speculation is on."""
    make, modules = any_drafter_class
    drafter = make(engine_dir, max_draft_len=3, num_threads=1, max_concurrency=2)
    executor = small_executor(modules, drafter, 3, resource_manager(modules), is_resting=lambda _, step: step % 7 == 3)
    for i in range(3):
        executor.submit(i, [1, i], 12 + 20 * (i == 2))
    executor.run()
    drafter.shutdown()
    assert executor.lengths[2]
    assert not any(executor.lengths[2])
    assert [len(executor.outputs[i]) for i in range(3)] == [12, 12, 32]


def bare_request(**without):
    """A request with what 1.4's entry records and nothing else."""
    fields = load_entries("1.4")["tensorrt_llm._torch.pyexecutor.llm_request.LlmRequest"].instance_attributes
    known = dict.fromkeys(fields, False) | {
        "py_request_id": 1,
        "py_orig_prompt_len": 2,
        "py_max_new_tokens": 30,
        "py_draft_tokens": [0] * 3,
        "py_draft_pages_allocated": 3,
        "get_tokens": lambda beam: [5, 6],
    }
    return SimpleNamespace(**{name: value for name, value in known.items() if name not in without})


def test_of_a_request_only_the_recorded_fields_are_used(any_drafter_class, engine_dir):
    make, modules = any_drafter_class
    drafter, request = make(engine_dir, max_draft_len=3, num_threads=1), bare_request()
    batch = SimpleNamespace(generation_requests=[request], context_requests=[bare_request()])
    drafter.prepare_draft_tokens(batch, resource_manager(modules))
    drafter.shutdown()
    assert len(request.py_draft_tokens) == 3


@pytest.mark.parametrize("gone", ["py_draft_pages_allocated", "py_orig_prompt_len", "get_tokens"])
def test_requests_without_a_field_are_refused_and_not_logged_as_a_failure(any_drafter_class, engine_dir, caplog, gone):
    make, modules = any_drafter_class
    drafter = make(engine_dir, max_draft_len=3, num_threads=1)
    batch = SimpleNamespace(generation_requests=[bare_request(**{gone: None})], context_requests=[])
    version = re.escape(modules["tensorrt_llm"].__version__)
    with pytest.raises(
        ConfigError, match=rf"^TensorRT-LLM {version} has requests without {gone}, .*; faser check --trtllm lists"
    ):
        drafter.prepare_draft_tokens(batch, resource_manager(modules))
    assert not caplog.text


@pytest.mark.parametrize(
    ("manager", "says"),
    [
        (None, r"has no KV cache manager, so"),
        (SimpleNamespace(), r"has a KV cache manager \(SimpleNamespace\) without mapping\.tp_size, so"),
        (
            SimpleNamespace(mapping=SimpleNamespace(tp_size=1, pp_size=1)),
            r"has a KV cache manager \(SimpleNamespace\) without mapping\.cp_size, so",
        ),
    ],
)
def test_a_kv_cache_manager_that_does_not_tell_the_number_of_gpus_is_refused(drafter_class, engine_dir, manager, says):
    make, _ = drafter_class
    drafter = make(engine_dir, max_draft_len=3, num_threads=1)
    batch = SimpleNamespace(generation_requests=[bare_request()], context_requests=[])
    with pytest.raises(ConfigError, match=f"{says} FaserDrafter cannot tell that the target is on one GPU"):
        drafter.prepare_draft_tokens(batch, SimpleNamespace(get_resource_manager=lambda kind: manager))


@pytest.mark.parametrize("mark", ["is_attention_dp_dummy", "is_cuda_graph_dummy", "is_dummy_request"])
def test_dummy_requests_are_not_drafted_for(drafter_class, engine_dir, mark, monkeypatch):
    make, modules = drafter_class
    drafter = make(engine_dir, max_draft_len=3, num_threads=1)
    asked = []
    propose = DraftCore.propose
    monkeypatch.setattr(
        DraftCore,
        "propose",
        lambda self, *some: asked.extend(one.request_id for one in some[0]) or propose(self, *some),
    )
    executor = small_executor(modules, drafter, 3, resource_manager(modules))
    dummy = executor.submit_dummy(mark)
    executor.submit(7, [1, 2], 10)
    for _ in range(10):
        executor.step()
    drafter.end(dummy)
    drafter.shutdown()
    assert set(asked) == {7}
    assert set(executor.lengths[1000]) == {0}


def test_tensorrt_llm_reports_the_end_of_requests(any_drafter_class, engine_dir, monkeypatch):
    make, modules = any_drafter_class
    config = make(engine_dir, max_draft_len=3, num_threads=1).decoding_config()
    ended = []
    end = DraftCore.end
    monkeypatch.setattr(DraftCore, "end", lambda self, request_id: ended.append(request_id) or end(self, request_id))
    executor = small_executor(modules, config.drafter, 3, resource_manager(modules, config.resource_manager))
    for i, length in enumerate((4, 12, 8)):
        executor.submit(i, [1, i], length)
    executor.run()
    config.drafter.shutdown()
    assert ended == [0, 2, 1]


def test_an_ended_request_gives_its_slot_back_at_once():
    """Without the report, the new request would take the slot that was unused for longest: the one that rests."""
    for told in (True, False):
        drafter = CoreDrafter(noise=0.0)
        core, slots = drafter.core, MAX_BATCH_SIZE
        everyone = [Asked(i, [1, i % VOCAB], 20, 3) for i in range(slots)]
        core.propose(everyone)
        core.propose(everyone[1:])  # 0 rests
        if told:
            core.end(3)
        core.propose([*everyone[1:3], Asked(9, [1, 4], 20, 3)])
        drafter.engine.rows.clear()
        assert core.propose([everyone[0]])[0] == greedy(TARGET, everyone[0].token_ids, 3)
        core.close()
        reads_again = max(drafter.engine.rows.get(True, [0])) > 1
        assert reads_again is not told


def test_an_id_that_is_used_again_after_its_end_is_a_new_request():
    drafter = CoreDrafter(noise=0.0)
    drafter.core.propose([Asked(1, [1, 2, 3], 20, 3)])
    drafter.core.end(1)
    drafter.core.end(77)  # never seen
    assert drafter.core.propose([Asked(1, [1, 2, 3, 4], 20, 3)]) == [greedy(TARGET, [1, 2, 3, 4], 3)]
    drafter.core.close()


def test_a_draft_on_the_gpu_is_opened_on_torchs_current_one(monkeypatch, tmp_path):
    engines = build_pair(tmp_path, vocab_size=300, hidden_size=32)
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True, current_device=lambda: 5))
    monkeypatch.setitem(sys.modules, "torch", torch)
    opened = []

    def gpu(ordinal):
        opened.append(ordinal)
        raise ConfigError("there is none")

    monkeypatch.setattr("faser_trtllm.engine.cuda.open.CudaGpu", gpu)
    with pytest.raises(ConfigError, match="there is none"):
        OpenedDrafter(DrafterOptions(engines.path, 3))
    assert opened == [5]


def test_a_draft_of_the_cuda_backend_says_the_same_ahead_or_not(modules, tmp_path):
    """On CPU tensors: its engine on the draft's side of the pair, its device loop, its thread."""
    engines = build_pair(tmp_path, vocab_size=300, hidden_size=32)
    proposals = []
    for draft_ahead in (False, True):
        options = DrafterOptions(engines.path, 3, max_batch_size=4, max_seq_len=128, draft_ahead=draft_ahead)
        opened = OpenedDrafter(options, lambda request, stack: open_cuda_draft(request, HostGpu(), stack))
        assert opened.core._drafter.drafters[0]._engine.partition == HostGpu.pair.draft
        right = opened.core.propose([Asked(9, [5, 6], 90, 3)])[0]
        rng = random.Random(1)
        tokens = {i: [i, 7, 11 + i] for i in range(3)}
        seen = [right]
        for _ in range(12):
            found = opened.core.propose([Asked(i, tokens[i], 60, 3) for i in range(3)])
            seen += found
            for i, proposal in enumerate(found):
                tokens[i] = tokens[i] + proposal[: rng.randint(0, 3)] + [rng.randrange(300)]
        proposals.append(seen)
        opened.close()
    assert proposals[0] == proposals[1]
    assert all(len(proposal) == 3 for proposal in proposals[0])


def test_it_may_be_pickled_before_and_after_its_first_use(drafter_class, engine_dir):
    make, _ = drafter_class
    drafter = make(str(engine_dir), max_draft_len=2, speculation="fixed:2", num_threads=1)
    batch = SimpleNamespace(generation_requests=[], context_requests=[])
    drafter.prepare_draft_tokens(batch)
    copy = pickle.loads(pickle.dumps(drafter))
    assert copy.faser_options == drafter.faser_options
    assert copy.max_total_draft_tokens == 2
    copy.prepare_draft_tokens(batch)
    copy.shutdown()
    drafter.shutdown()


def test_a_failure_ends_drafting_and_nothing_else(drafter_class, engine_dir, monkeypatch, caplog):
    make, modules = drafter_class
    drafter = make(engine_dir, max_draft_len=3, num_threads=1)
    monkeypatch.setattr(DraftCore, "propose", lambda *_: 1 / 0)
    executor = PyExecutor(modules, drafter, lambda tokens: (tokens[-1] + 1) % VOCAB, 3)
    executor.submit(1, [1, 2], 10)
    executor.run()
    assert len(executor.outputs[1]) == 10
    assert caplog.text.count("TensorRT-LLM goes on without drafts") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_draft_len": 0}, "max_draft_len is 0"),
        ({"speculation": "price"}, "needs a cost_table"),
        ({"speculation": "fixed:9"}, "max_draft_len 4"),
        ({"max_concurrency": 0}, "max_concurrency is 0; it must be at least 1"),
        ({"draft_len_schedule": {4: 2}}, "it must give 1 active request the length max_draft_len"),
        ({"draft_len_schedule": {1: 4, 2: 5}}, "lengths from 0 to that"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_opened(engine_dir, options, says):
    with pytest.raises(ConfigError, match=says):
        check_drafter(DrafterOptions(engine_dir, **options))


def test_a_modeled_cost_table_is_refused(engine_dir, tmp_path):
    replace(toy_costs(), source="modeled", anchors="tables of NVIDIA").save(tmp_path / "costs.json")
    with pytest.raises(ConfigError, match=r"costs\.json is modeled \(from tables of NVIDIA\)"):
        OpenedDrafter(DrafterOptions(engine_dir, cost_table=tmp_path / "costs.json"))


def test_without_the_package_one_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    monkeypatch.delitem(vars(drafter_module), "FaserDrafter", raising=False)
    with pytest.raises(ConfigError, match=r"tensorrt_llm is missing.*install tensorrt-llm"):
        _ = drafter_module.FaserDrafter
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        _ = drafter_module.Other
