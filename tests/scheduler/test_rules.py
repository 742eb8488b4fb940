"""Golden vectors of the scheduling rules: rows, capacity, order, rewind."""

import gc
import itertools
import random
import weakref

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.config import CapacitySchedulerPolicy
from faser_trtllm.core.plan import DraftResult, Ended, VerifyResult
from faser_trtllm.core.request import FinishReason, Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.policy.base import Decision, StatelessPolicy
from faser_trtllm.scheduler.rows import MAX_CONTEXT_LOGITS, chunk_length
from faser_trtllm.scheduler.scheduler import SchedulerLimits
from tests.scheduler.fake_pass import Bench
from tests.support.columns import columns
from tests.support.toy_guide import ToyGuide

NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
NOTHING_SAMPLED = (np.zeros((0, 0), np.int32), *columns([], [], []))


def test_a_context_costs_its_chunk_and_chunks_are_aligned():
    bench = Bench(max_num_tokens=10)
    bench.add(25)
    assert [bench.step()[1] for _ in range(4)] == [[("0", 8, 0)], [("0", 8, 0)], [("0", 9, 0)], [("0", 1, 0)]]


def test_a_decoding_request_costs_one_and_its_drafts():
    bench = Bench(drafts=3, max_num_tokens=12)
    bench.add(4, max_tokens=20)
    bench.step()
    bench.add(30, max_tokens=20, first=7)
    assert bench.step()[1] == [("0", 1, 3), ("1", 8, 0)]


def test_drafts_give_way_before_a_decoding_request_loses_its_row():
    bench = Bench(drafts=4, max_num_tokens=8)
    for first in (0, 10, 20, 30):
        bench.add(1, max_tokens=20, first=first)
    rows = bench.step()[1]
    assert sum(new + drafts for _, new, drafts in rows) <= 8
    assert [new for _, new, _ in rows] == [1, 1, 1, 1]


def test_a_chunk_unit_is_kept_back_from_drafts_for_contexts():
    bench = Bench(drafts=8, max_num_tokens=12)
    bench.add(1, max_tokens=40)
    bench.step()
    bench.add(12, first=3)
    assert bench.step()[1] == [("0", 1, 7), ("1", 4, 0)], "8 drafts would leave 3 rows, too few for a chunk of 4"


def test_without_chunking_a_prompt_runs_as_one_or_waits():
    bench = Bench(max_num_tokens=16, enable_chunked_context=False)
    bench.add(10)
    bench.add(10, first=20)
    assert bench.step()[1] == [("0", 10, 0)]
    assert bench.step()[1] == [("0", 1, 0), ("1", 10, 0)]
    with pytest.raises(InvalidArgumentError, match=r"17 tokens, max_num_tokens is 16"):
        bench.add(17)


def test_a_whole_prompt_without_a_mask_in_its_first_step_is_not_overtaken_for_ever():
    """The budget for masks is spent on four others, so it is admitted without rows; then newcomers come without end."""
    bench = Bench(max_num_tokens=16, max_batch_size=8, num_blocks=2000, enable_chunked_context=False)
    guide = ToyGuide.random(5, 1, 4)
    for first in range(4):
        bench.add(1, max_tokens=6, guide=guide, first=first)
    late = bench.add(14, max_tokens=4, guide=guide, first=9)
    for number in range(20):
        if late.request_id in [name for name, *_ in bench.step()[1]]:
            return
        bench.add(1, max_tokens=6, first=number)
    pytest.fail("it waits for rows that later requests take")


def test_no_evict_reserves_to_completion_and_the_head_of_the_line_stops():
    bench = Bench(num_blocks=8, capacity_policy=NO_EVICT)
    bench.add(4, max_tokens=16)  # 5 blocks to completion
    bench.add(4, max_tokens=12, first=10)  # 4 blocks: does not fit beside it
    bench.add(1, max_tokens=2, first=20)  # would fit, but is behind
    plan = bench.step()[0]
    assert [r.request_id for r in plan.admitted] == ["0"]


def test_max_utilization_admits_more_and_preempts_the_last():
    bench = Bench(num_blocks=6, capacity_policy=MAX_UTILIZATION)
    first = bench.add(4, max_tokens=20)
    second = bench.add(4, max_tokens=20, first=10)
    plan = bench.step()[0]
    assert [r.request_id for r in plan.admitted] == ["0", "1"]
    for _ in range(200):
        plan = bench.step()[0]
        if plan.paused:
            break
    assert plan.paused == (second,)
    assert second.num_computed_tokens == 0
    assert second.num_tokens > second.prompt_len, "its tokens are kept"
    while bench.scheduler.has_work():
        bench.step()
    assert first.num_output_tokens == second.num_output_tokens == 20


def test_preemption_keeps_pending_drafts_and_no_kv():
    bench = Bench(num_blocks=3, capacity_policy=MAX_UTILIZATION)
    first, second = bench.add(3), bench.add(1, first=10)
    bench.step()
    bench.step()
    second.num_drafts = 4
    assert bench.kv.allocate(second.slot, second.num_tokens + 4)
    assert first.num_tokens == 5, "needs a second block now, and none is free"
    assert bench.step()[0].paused == (second,)
    assert (second.num_drafts, second.num_computed_tokens, second.num_draft_computed_tokens) == (4, 0, 0)


def test_priority_then_arrival():
    bench = Bench(max_batch_size=1)
    bench.add(2)
    bench.add(2, first=10)
    bench.add(2, first=20, priority=0.9)
    order = []
    while bench.scheduler.has_work():
        order += [r.request_id for r in bench.step()[0].admitted]
    assert order == ["2", "0", "1"]


def test_deadlines_end_waiting_and_running_requests():
    bench = Bench(max_batch_size=1)
    running = bench.add(2, max_tokens=40, deadline_s=5.0)
    waiting = bench.add(2, max_tokens=40, deadline_s=3.0, first=9)
    bench.step()
    bench.clock.advance(4.0)
    assert bench.step()[0].finished == (waiting,)
    bench.clock.advance(4.0)
    assert bench.step()[0].finished == (running,)
    assert {running.finish_reason, waiting.finish_reason} == {FinishReason.TIMEOUT}
    assert not bench.scheduler.has_work()


def test_a_request_that_has_ended_is_not_kept_until_its_deadline():
    bench = Bench()
    ended = weakref.ref(bench.add(2, max_tokens=2, deadline_s=1e9))
    bench.add(2, max_tokens=40, first=9)
    while len(bench.step()[0].scheduled) > 1:
        pass
    for _ in range(3):
        bench.step()
    gc.collect()
    assert ended() is None


def test_a_request_that_the_cache_can_never_hold_is_refused_with_both_numbers():
    bench = Bench(num_blocks=4)
    with pytest.raises(InvalidArgumentError, match=r"are 30 tokens, the KV cache holds 16"):
        bench.add(10, max_tokens=20)


def test_a_chunk_unit_larger_than_the_rows_cannot_stop_the_line():
    bench = Bench(max_num_tokens=4, max_batch_size=4, chunk_unit_size=64)
    requests = [bench.add(20, first=10 * i) for i in range(4)]
    for _ in range(500):
        bench.step()
    assert all(r.finish_reason is FinishReason.LENGTH for r in requests)


def test_nobody_is_preempted_for_drafts():
    bench = Bench(drafts=8, num_blocks=5, capacity_policy=MAX_UTILIZATION)
    bench.add(4, max_tokens=12)  # grows from 2 blocks to 4, at once if it gets blocks for all its drafts
    bench.add(4, max_tokens=4, first=10)  # needs a second block in the same step
    while bench.scheduler.has_work():
        assert bench.step()[0].paused == ()


def test_without_chunking_a_prompt_that_cannot_fit_yet_leaves_the_drafts_alone():
    bench = Bench(drafts=4, max_num_tokens=16, enable_chunked_context=False)
    bench.add(2, max_tokens=30)
    bench.step()
    bench.add(16, first=7)
    assert bench.step()[1] == [("0", 1, 4)]


def test_without_chunking_a_preempted_request_longer_than_a_pass_is_chunked_to_its_end():
    """Its last 15 tokens would fit a pass alone, but new requests may keep 3 rows busy forever."""
    limits = SchedulerLimits(4, 16, 64, 0, enable_chunked_context=False, chunk_unit_size=4)
    again = Request("0", np.arange(27), SamplingParams(), max_seq_len=64, max_draft_len=0)
    again.num_computed_tokens = 12
    assert chunk_length(again, 13, limits) == 12
    prompt = Request("1", np.arange(15), SamplingParams(), max_seq_len=64, max_draft_len=0)
    assert chunk_length(prompt, 13, limits) == 0


def test_prompts_with_log_probs_leave_a_row_with_logits_to_a_prompt_that_joins():
    """Such a prompt may take as many passes as it has tokens; others need one row of one pass."""
    bench = Bench(max_logit_rows=8, max_num_tokens=32)
    for first in (0, 20):
        bench.add(40, first=first, return_context_log_probs=True)
    assert bench.step()[1] == [("0", 8, 0)], "all rows with logits, while nobody else waits"
    bench.add(3, client_key="another")
    assert bench.step()[1] == [("0", 7, 0), ("1", 1, 0)], "the queue's order holds"
    assert bench.step()[1] == [("0", 7, 0), ("2", 3, 0)]


def test_a_pass_holds_few_rows_of_prompts_with_log_probs():
    """Others wait for the pass, and such a row takes longer than its prompt's alone."""
    bench = Bench(max_num_tokens=256, max_seq_len=256, num_blocks=256)
    for first in (0, 10):
        bench.add(100, first=first, return_context_log_probs=True)
    bench.add(100, first=20, client_key="another")
    assert bench.step()[1] == [("0", MAX_CONTEXT_LOGITS, 0), ("2", 100, 0)]
    left = 100 - MAX_CONTEXT_LOGITS
    assert bench.step()[1] == [("0", left, 0), ("1", MAX_CONTEXT_LOGITS - left, 0), ("2", 1, 0)]


@pytest.mark.parametrize(("is_kv_wrong", "num_cached"), [(True, 0), (False, 24)])
@pytest.mark.parametrize("max_num_tokens", [32, 12])
def test_blocks_of_a_request_whose_kv_is_wrong_are_not_reused(is_kv_wrong, num_cached, max_num_tokens):
    """Also those of chunks before the last, which has the logits."""
    bench = Bench(max_num_tokens=max_num_tokens)
    bench.add(25)
    plan = bench.scheduler.schedule()
    while not plan.scheduled.num_sampled:
        bench.scheduler.update(plan, DraftResult(*columns([0], [0])), VerifyResult(*NOTHING_SAMPLED, *columns([0])))
        plan = bench.scheduler.schedule()
    sampled = columns([0], [0], [native.FAILED], [0])
    ended = {0: Ended(FinishReason.ERROR, "it failed", is_kv_wrong)}
    result = VerifyResult(np.zeros((1, 1), np.int32), *sampled, ended=ended)
    bench.scheduler.update(plan, DraftResult(*columns([0], [0])), result)
    again = bench.add(25)
    bench.step()
    assert again.stats.num_cached_tokens == num_cached


def test_reused_blocks_count_when_a_request_runs_and_not_in_each_step_that_it_waits():
    bench = Bench(max_num_tokens=10)
    bench.add(16)
    while bench.scheduler.has_work():
        bench.step()
    assert bench.scheduler.gauges()["kv_num_reused_blocks"] == 0
    bench.add(40, first=20)
    bench.step()
    cached = bench.add(24)  # four blocks of it are cached; the prompt before it leaves two rows
    for _ in range(3):
        bench.step()
        assert cached.slot < 0
        assert bench.scheduler.gauges()["kv_num_reused_blocks"] == 0
    while bench.scheduler.has_work():
        bench.step()
    assert cached.stats.num_cached_tokens == 16
    assert bench.scheduler.gauges()["kv_num_reused_blocks"] == 4


def test_cancelled_requests_do_not_pile_up_behind_the_head_of_the_line():
    bench = Bench(max_batch_size=1)
    bench.add(2, max_tokens=40)
    bench.step()
    bench.add(2, priority=0.9)
    cancelled = [weakref.ref(bench.add(2)) for _ in range(500)]
    for request in list(cancelled):
        bench.scheduler.cancel(request().request_id)
    gc.collect()
    assert sum(request() is not None for request in cancelled) < 100
    assert bench.scheduler.gauges()["num_waiting"] == 1


class _LoosePolicy(StatelessPolicy):
    """Other lengths in every step, beyond what is allowed and below what is pending."""

    name = "loose"

    def __init__(self, seed):
        self.random = random.Random(seed)

    def plan(self, view):
        return Decision([self.random.randint(0, 12) for _ in view.decoding])


@pytest.mark.parametrize("max_num_tokens", [10, 64])
@pytest.mark.parametrize("seed", range(6))
def test_the_steady_state_is_scheduled_as_any_other(seed, max_num_tokens):
    """The short way and the long way give the same plans, drafts carried over, limits near and rows short included."""
    sizes = {"max_batch_size": 5, "max_num_tokens": max_num_tokens, "num_blocks": 200}
    benches = [Bench(drafts=8, policy=_LoosePolicy(seed), **sizes) for _ in range(2)]
    short, long = (bench.scheduler for bench in benches)
    short_ways = []
    steady_step = short._steady_step
    short._steady_step = lambda *args: short_ways.append(1) or steady_step(*args)
    long._has_ample_blocks = lambda: False
    for bench in benches:
        bench.add(3, max_tokens=40)
    rng = random.Random(seed)
    for step in itertools.count():
        if not short.has_work():
            break
        if step in (2, 3, 5, 7):  # drafts that were pending before may be more than the rows that newcomers leave
            for bench in benches:
                bench.add(1, max_tokens=30 + step, first=7 * step)
        accept, carry, trim = rng.randint(0, 3), rng.random() < 0.7, rng.randint(0, 2)
        (plan, rows, _), (other, other_rows, _) = (bench.step(accept, carry, trim=trim) for bench in benches)
        assert rows == other_rows
        assert plan.scheduled.max_verified.tolist() == other.scheduled.max_verified.tolist()
        assert [r.request_id for r in plan.view.decoding] == [r.request_id for r in other.view.decoding]
        assert plan.is_drafting == other.is_drafting
        assert benches[0].kv.num_free_blocks == benches[1].kv.num_free_blocks
    assert len(short_ways) > 5
