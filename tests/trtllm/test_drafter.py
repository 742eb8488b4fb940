"""Drafting inside TensorRT-LLM, over the generated stand-ins: right drafts whatever happens to requests and batches."""

from __future__ import annotations

import pickle
import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.trtllm import drafter as drafter_module
from faser_trtllm.trtllm.drafter import DrafterOptions, OpenedDrafter, check_drafter
from faser_trtllm.trtllm.drafter_core import Asked, DraftCore
from tests.checkpoints import make_pair
from tests.engine.cuda_harness import build_pair, one_thread  # noqa: F401
from tests.engine.test_cuda_executor import HostGpu
from tests.executor.harness import Collector, toy_costs
from tests.executor.toy_engine import ToyEngine, blend, context_row, make_table
from tests.trtllm.py_executor import PyExecutor, install

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


@pytest.fixture(scope="module")
def modules():
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch)


def make_executor(modules, drafter, **options):
    return PyExecutor(modules, drafter, lambda tokens: greedy(TARGET, tokens, 1)[0], MAX_DRAFT_LEN, **options)


POLICIES = ["fixed:3", "fixed:1", "schedule:1=3,3=1", "gp_lcb", "schedule", "price", "off"]


@settings(max_examples=60, deadline=None)
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


def test_lengths_differ_between_requests_by_what_is_accepted(modules):
    """One request's drafts are always right and two others' never: price learns which, and gives the one more.

    Drafts for all would take the pass a stair up.
    """
    drafter = CoreDrafter(noise=0.0, policy="price", max_seq_len=1200)
    good = 0

    def next_token(tokens):
        right = greedy(TARGET, tokens, 1)[0]
        return right if tokens[0] == good else (right + 1) % VOCAB

    executor = PyExecutor(modules, drafter, next_token, MAX_DRAFT_LEN)
    for i in range(3):
        executor.submit(i, [good if i == 0 else 1, i, 2], 900)
    for _ in range(200):
        executor.step()
    drafter.core.close()
    right, *wrong = (drafter.policy.estimator.offset(drafter.core._known[i]) for i in range(3))
    assert right > 1.0 + max(wrong)
    right, *wrong = (sum(executor.lengths[i][-100:]) for i in range(3))  # what it takes to be sure of it is over
    assert right > 1.2 * max(wrong), (right, wrong)


def test_the_policy_is_told_how_many_tokens_came(modules, monkeypatch):
    """It judges its plans by that count."""
    drafter, views = CoreDrafter(noise=0.7), []
    plan = drafter.policy.plan
    monkeypatch.setattr(drafter.policy, "plan", lambda view: views.append(view_of(view)) or plan(view))

    def view_of(view):
        return len(view.decoding), view.num_generated, sum(request.num_tokens for request in view.decoding)

    run_four(modules, drafter)
    together = [(generated, total) for size, generated, total in views if size == 4]
    assert len(together) > 5
    assert [generated for generated, _ in together] == [total - together[0][1] for _, total in together]


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
    directory = tmp_path_factory.mktemp("drafter")
    target, draft = make_pair(directory / "pair", num_layers=2)
    options = BuildOptions(target, draft, directory / "engines", max_batch_size=4, max_num_tokens=64, max_seq_len=160)
    build_engines(options)
    return directory / "engines"


@pytest.fixture
def drafter_class(monkeypatch):
    """FaserDrafter over fresh stand-ins."""
    monkeypatch.delitem(vars(drafter_module), "FaserDrafter", raising=False)
    modules = install(monkeypatch)
    yield drafter_module.FaserDrafter, modules
    vars(drafter_module).pop("FaserDrafter", None)


def target_alone(engine_dir, prompts, max_tokens):
    collector = Collector()
    with open_executor(engine_dir, ExecutorConfig(speculation="off")) as executor:
        for i, prompt in enumerate(prompts):
            executor.submit(str(i), prompt, SamplingParams(max_tokens=max_tokens), collector.sink(str(i)))
        while executor.step():
            pass
    return [collector.tokens[str(i)] for i in range(len(prompts))]


def test_faser_drafter_over_a_real_draft_engine_gives_the_targets_text(drafter_class, engine_dir):
    make, modules = drafter_class
    prompts = [[i + 3, i + 5, i + 7] for i in range(3)]
    texts = target_alone(engine_dir, prompts, 60)
    known = {tuple(prompt): prompt + text for prompt, text in zip(prompts, texts, strict=True)}
    drafter = make(engine_dir, max_draft_len=4, num_threads=1)
    config = modules["tensorrt_llm.llmapi"].UserProvidedDecodingConfig(drafter=drafter, max_draft_len=4)
    executor = PyExecutor(modules, config.drafter, lambda tokens: known[tuple(tokens[:3])][len(tokens)], 4)
    for i, prompt in enumerate(prompts):
        executor.submit(i, prompt, 59)  # the known texts end there
    executor.run()
    drafter.shutdown()
    assert [executor.outputs[i] for i in range(3)] == [text[:59] for text in texts]
    assert any(proposal for _, proposal in executor.proposals)


class HostGpuContext(HostGpu):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_a_draft_of_the_cuda_backend_says_the_same_ahead_or_not(modules, tmp_path):
    """On CPU tensors: its engine on the draft's side of the pair, its device loop, its thread."""
    engines = build_pair(tmp_path, vocab_size=300, hidden_size=32)
    proposals = []
    for draft_ahead in (False, True):
        options = DrafterOptions(engines.path, 3, max_batch_size=4, max_seq_len=128, draft_ahead=draft_ahead)
        opened = OpenedDrafter(options, HostGpuContext)
        assert opened.core._drafter._engine.partition == HostGpu.pair.draft
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
    ],
)
def test_wrong_options_are_refused_before_anything_is_opened(engine_dir, options, says):
    with pytest.raises(ConfigError, match=says):
        check_drafter(DrafterOptions(engine_dir, **options))


def test_without_the_package_one_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    monkeypatch.delitem(vars(drafter_module), "FaserDrafter", raising=False)
    with pytest.raises(ConfigError, match=r"tensorrt_llm is missing.*install tensorrt-llm"):
        _ = drafter_module.FaserDrafter
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        _ = drafter_module.Other
