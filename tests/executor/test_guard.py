"""When drafting breaks, the text stays the same and speculation rests for a while."""

import json
import operator
from dataclasses import replace
from itertools import cycle, product
from types import SimpleNamespace

import numpy as np
import pytest

from faser_trtllm.builder.build import BuildOptions, build_engines
from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.plan import DraftResult, ScheduledRequest, ScheduledRequests
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor import guard as guard_module
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.executor.guard import DisabledReason, SpeculationGuard
from lab.clock import ManualClock
from lab.delegating_engine import DelegatingEngine
from lab.faults import parse_faults, with_faults
from tests.support.checkpoints import make_pair, random_tensors, write_safetensors
from tests.support.columns import columns
from tests.support.effort import pick
from tests.support.executor_harness import Collector, Setup, run
from tests.support.random_setups import POLICIES, greedy_reference

SPECULATING = sorted(set(POLICIES))


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Shorten the guard's intervals to the steps of a toy request; each step advances the clock by a millisecond."""
    monkeypatch.setattr(guard_module, "BACKOFF_S", 0.004)
    monkeypatch.setattr(guard_module, "EMPTY_STEPS", 3)


def _disabled(executor):
    stats = executor.stats()
    return {reason.value for reason in DisabledReason if stats[f"num_spec_fallbacks_{reason.value}"]}


def _drive(setup, requests, until=None):
    """Run all requests to their end -> executor, collector; until(executor) is asked after each step."""
    executor, collector = setup.open(), Collector()
    for index, (prompt, params) in enumerate(requests):
        executor.submit(str(index), prompt, params, collector.sink(str(index)))
    while executor.step():
        setup.clock.advance(0.001)
        executor.check_integrity()
        if until is not None and until(executor):
            break
    return executor, collector


REQUESTS = [
    ([1, 2, 3], SamplingParams(max_tokens=50)),
    ([4, 0], SamplingParams(max_tokens=50, temperature=1.0, seed=7)),
    ([2, 2, 2, 2], SamplingParams(max_tokens=50, temperature=1.5, seed=8, repetition_penalty=1.2)),
]


FAULTS = [
    ("draft_error@step3,draft_error@step9", "draft_error"),
    ("draft_error@step1+", "draft_error"),
    ("draft_oom@step2", "draft_oom"),
    ("draft_nan@step2+", "draft_nan"),
]


@pytest.mark.parametrize(
    ("policy", "fault"), pick(list(zip(SPECULATING, cycle(FAULTS))), list(product(SPECULATING, FAULTS)))
)
def test_a_failing_draft_changes_no_token(policy, fault):
    faults, reason = fault
    setup = Setup(policy=policy, faults=faults)
    executor, collector = _drive(setup, REQUESTS)
    assert _disabled(executor) == {reason}
    assert collector.tokens["0"] == greedy_reference(setup.target.table, [1, 2, 3], 50)
    plain = Setup(max_batch_size=1)
    for index, request in enumerate(REQUESTS):
        assert collector.tokens[str(index)] == run(plain, [request]).tokens["0"]
        assert collector.reasons[str(index)] == "length"


def test_speculation_comes_back_after_its_rest():
    setup = Setup(policy="fixed:3", faults="draft_error@step4", noise=0.0)
    drafted = []

    def watch(executor):
        stats = executor.stats()
        drafted.append((stats["spec_disabled_draft_error"], stats["num_draft_tokens"]))
        return False

    _drive(setup, REQUESTS[:1], watch)
    off = [number for is_off, number in drafted if is_off]
    on_again = [number for is_off, number in drafted[len(off) :] if not is_off]
    assert 3 <= len(off) <= 6
    assert len(set(off)) == 1, "nothing is drafted while it rests"
    assert max(on_again) > off[0]


def test_each_failure_in_a_row_doubles_the_rest(caplog):
    _drive(Setup(policy="fixed:3", faults="draft_error@step1+"), REQUESTS[:1])
    messages = [record.message for record in caplog.records if "off for" in record.message]
    rests = [float(message.split("off for ")[1].split(" s")[0]) for message in messages]
    assert len(rests) >= 3
    assert rests == [0.004 * 2**n for n in range(len(rests))]


@pytest.mark.parametrize("fault", ["draft_error@step2", "draft_oom@step2"])
def test_an_error_is_raised_where_no_guard_is(fault):
    setup = Setup(policy="fixed:3")
    executor, collector = setup.open(), Collector()
    executor._draft_worker._stage.drafters[-1]._engine = with_faults(setup.draft, "draft", parse_faults(fault))
    executor.submit("0", [1, 2], SamplingParams(max_tokens=20), collector.sink("0"))
    with pytest.raises(Exception, match="on purpose"):
        any(not executor.step() for _ in range(100))


def test_a_slow_draft_is_a_timeout_but_not_while_it_reads_prompts():
    class SlowClock:
        """Every look at the clock takes 10 ms, so a draft call does too."""

        def __init__(self):
            self.now = 0.0

        def now_s(self):
            self.now += 0.01
            return self.now

        def advance(self, seconds):
            self.now += seconds

    def reasons(timeout_ms, prompt, max_tokens):
        setup = Setup(policy="fixed:3", faults="draft_error@step999999", draft_timeout_ms=timeout_ms)
        executor = setup.open()
        clock = SlowClock()
        executor._draft_worker._stage._stage.drafters[-1]._clock = clock
        collector = Collector()
        executor.submit("0", prompt, SamplingParams(max_tokens=max_tokens), collector.sink("0"))
        while executor.step():
            pass
        assert collector.tokens["0"] == greedy_reference(setup.target.table, prompt, max_tokens)
        return _disabled(executor)

    assert reasons(5.0, [1, 2], 20) == {"draft_timeout"}
    assert reasons(15.0, [1, 2], 20) == set()
    assert reasons(5.0, [1, 2, 3, 4] * 10, 1) == set()


MASKED, FREE = SamplingParams(allowed_token_ids=(1,)), SamplingParams()


def _call(rows_per_request, draft_ms=0.0, new=(2, 2), free=None, params=(FREE, FREE), asked=2):
    """A step of two requests, whose draft call took draft_ms."""
    drafts = DraftResult(
        *columns(new, [3, 3]),
        draft_ms,
        num_rows=2 * rows_per_request,
        num_asked=asked,
        num_free=None if free is None else np.array(free, np.int32),
    )
    items = []
    for one in params:
        request = Request(str(len(items)), [1, 2], one, max_seq_len=64, max_draft_len=4)
        request.num_computed_tokens = 1
        items.append(ScheduledRequest(request, 1, 4, 4))
    return SimpleNamespace(scheduled=ScheduledRequests.of(items)), drafts


def _guard(max_draft_rows):
    return SpeculationGuard(ManualClock(), 5.0, max_draft_rows, forget_draft_kv=lambda: None)


@pytest.mark.parametrize(("rows_per_request", "reasons"), [(1, {"draft_timeout"}), (6, {"draft_timeout"}), (7, set())])
def test_a_head_has_a_time_limit_even_where_it_runs_all_accepted_tokens_again(rows_per_request, reasons):
    guard = _guard(max_draft_rows=2 + 4)
    guard.drafted(*_call(rows_per_request, draft_ms=5.1))
    assert {r.value for r in DisabledReason if guard.gauges()[f"num_spec_fallbacks_{r.value}"]} == reasons


@pytest.mark.parametrize(("new", "free", "is_off"), [((2, 0), (2, 0), True), ((2, 1), (2, 0), False)])
def test_drafts_of_the_text_do_not_hide_a_draft_model_without_drafts(new, free, is_off):
    guard = _guard(max_draft_rows=2)
    for _ in range(guard_module.EMPTY_STEPS):
        guard.drafted(*_call(1, new=new, free=free))
    assert guard.gauges()["num_spec_fallbacks_draft_nan"] == is_off


@pytest.mark.parametrize(
    ("params", "asked", "free", "is_off"),
    [
        ([MASKED, MASKED], 2, None, False),
        ([MASKED, FREE], 2, None, True),
        ([MASKED, FREE], 1, None, False),  # it may have been the masked one
        ([SamplingParams(allowed_token_ids=(1,), drafters=("suffix",)), FREE], 1, None, True),
        ([SamplingParams(allowed_token_ids=(1,), num_draft_tokens=0), FREE], 1, None, True),
        ([MASKED, FREE], 1, (4, 0), True),  # the text gave the masked one all drafts that it wants
    ],
)
def test_calls_without_a_draft_count_if_a_request_without_a_mask_was_drafted_for(params, asked, free, is_off):
    guard = _guard(max_draft_rows=2)
    for _ in range(guard_module.EMPTY_STEPS):
        guard.drafted(*_call(1, new=free or (0, 0), free=free, params=params, asked=asked))
    assert guard.gauges()["num_spec_fallbacks_draft_nan"] == is_off


def test_a_mask_without_the_draft_models_tokens_switches_speculation_off_for_nobody():
    """Toy drafts of another vocabulary lack token 1, the only one that is allowed."""
    faults = "draft_error@step999999"
    masked = ([1, 2, 3], SamplingParams(max_tokens=40, allowed_token_ids=(1,)))
    setup = Setup(policy="fixed:3", drafters="foreign", faults=faults)
    executor, collector = _drive(setup, [masked])
    assert collector.tokens["0"] == [1] * 40
    assert executor.stats()["num_draft_tokens"] == 0
    assert _disabled(executor) == set()
    executor, _ = _drive(Setup(policy="fixed:3", drafters="foreign", faults="draft_nan@step2+"), [masked, REQUESTS[0]])
    assert _disabled(executor) == {"draft_nan"}, "a request without a mask shows that the drafts failed"


class NanOnce(DelegatingEngine):
    """A draft engine whose first call reads the token BAD, whose embedding is NaN, in place of one of the prompt."""

    BAD = 300
    is_over = False

    def draft(self, draft_batch):
        if not self.is_over:
            self.is_over = True
            token_ids = draft_batch.batch.token_ids.copy()
            token_ids[5] = self.BAD
            draft_batch = replace(draft_batch, batch=replace(draft_batch.batch, token_ids=token_ids))
        return super().draft(draft_batch)


def test_nan_is_forgotten_before_drafting_is_tried_again(tmp_path):
    """The KV has it, which the request and others with its prefix would read in each later call."""
    target, draft = make_pair(tmp_path, num_layers=2)
    tensors = random_tensors(json.loads((draft / "config.json").read_text()), seed=0)
    tensors["model.embed_tokens.weight"][NanOnce.BAD] = np.nan
    write_safetensors(draft, tensors, "bfloat16")
    sizes = {"max_seq_len": 128, "max_batch_size": 2, "max_num_tokens": 64, "max_draft_len": 3, "tokens_per_block": 16}
    build_engines(BuildOptions(target, draft, tmp_path / "engines", **sizes))
    clock, collector = ManualClock(), Collector()
    with open_executor(
        tmp_path / "engines",
        ExecutorConfig(num_threads=1, speculation="fixed:3"),
        clock,
        wrap_engine=lambda engine, role: NanOnce(engine) if role == "draft" else engine,
        draft_timeout_ms=1e9,
    ) as executor:
        for name in ("hit", "same prefix"):
            executor.submit(name, range(3, 43), SamplingParams(max_tokens=40), collector.sink(name))
            while executor.step():
                clock.advance(0.001)
                executor.check_integrity()
        assert executor.stats()["num_spec_fallbacks_draft_nan"] == 1
    hit, other = (collector.requests[name].stats for name in ("hit", "same prefix"))
    assert other.num_cached_tokens > 0
    assert 0 < hit.num_draft_tokens < other.num_draft_tokens
    assert collector.tokens["hit"] == collector.tokens["same prefix"]


def _opposed_tables(setup):
    """A draft whose best token is always the target's worst: no greedy draft is ever accepted."""
    target, _ = setup.make_tables()
    return target, -target


@pytest.mark.parametrize(
    ("policy", "most", "reasons"),
    [
        ("fixed:3", 1000, {"no_acceptance"}),
        ("fixed:3:draft_ahead", 1000, {"no_acceptance"}),
        ("gp_lcb", 1000, {"no_acceptance"}),
        ("price", 300, set()),  # drafting costs nothing by this clock, so trials may be many
        ("schedule", 100, set()),
    ],
)
def test_a_draft_that_is_never_right_is_switched_off(policy, most, reasons, monkeypatch):
    """After 1000 fruitless steps, unless the policy stops by itself long before."""
    monkeypatch.setattr(guard_module, "BACKOFF_S", 300.0)
    setup = Setup(policy=policy, faults="draft_error@step999999", max_seq_len=1600, tokens_per_block=32, num_blocks=50)
    setup.tables = _opposed_tables(setup)
    prompt, max_tokens = [1, 2, 3], 1500
    drafted = []

    def watch(executor):
        drafted.append(executor.stats()["num_draft_tokens"])
        return False

    executor, collector = _drive(setup, [(prompt, SamplingParams(max_tokens=max_tokens))], watch)
    stats = executor.stats()
    assert stats["num_accepted_tokens"] == 0
    assert collector.tokens["0"] == greedy_reference(setup.target.table, prompt, max_tokens)
    num_drafting = sum(map(operator.lt, drafted, drafted[1:]))
    assert 0 < num_drafting <= most
    assert _disabled(executor) == reasons


def test_one_accepted_draft_begins_the_count_anew(monkeypatch):
    """Eight in a row are too many; this request has more, but never in a row."""
    monkeypatch.setattr(guard_module, "FRUITLESS_STEPS", 8)
    accepted = []

    def watch(executor):
        accepted.append(executor.stats()["num_accepted_tokens"])
        return False

    executor, _ = _drive(Setup(policy="fixed:1", faults="draft_error@step999999", noise=2.0), REQUESTS[:1], watch)
    assert sum(map(operator.eq, accepted, accepted[1:])) > 8
    assert _disabled(executor) == set()
