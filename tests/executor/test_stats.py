"""Tests of the executor's counts against those of its requests."""

import gc
import time
import weakref
from itertools import pairwise

import pytest

from faser_trtllm.core.plan import OutputEnd
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.stats import HISTOGRAMS, ExecutorStats, Histogram, StepWatcher
from tests.support.counted_run import Run, some_requests
from tests.support.executor_harness import Collector, Setup
from tests.support.toy_engine import make_table

POLICIES = ["off", "fixed:3", "fixed:3:draft_ahead", "fixed:3:ping_pong", "erratic"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
def test_counts_add_up(policy, capacity):
    num_blocks = 20 if capacity == "MAX_UTILIZATION" else 128
    setup = Setup(policy=policy, capacity=capacity, num_blocks=num_blocks, max_batch_size=4, max_num_tokens=24)
    run = Run(setup, some_requests(1))
    stats = run.stats
    num_output = sum(request.num_output_tokens for request in run.requests)
    assert stats["num_output_tokens"] == num_output > 0
    assert stats["num_accepted_tokens"] == run.total("num_accepted_tokens")
    assert stats["num_draft_tokens"] == run.total("num_draft_tokens")
    assert stats["num_pruned_rows"] >= run.total("num_pruned_rows")
    assert stats["num_steps"] == run.num_steps
    per_pos = run.series("num_accepted_tokens_per_pos")
    assert len(per_pos) == (0 if policy == "off" else setup.max_draft_len)
    assert sum(per_pos) == stats["num_accepted_tokens"]
    assert per_pos == sorted(per_pos, reverse=True), "a position is accepted only behind the one before it"
    assert all(count <= stats["num_drafts"] for count in per_pos)
    by_len = run.series("num_verified_by_len")
    assert sum(length * count for length, count in enumerate(by_len)) == stats["num_verified_tokens"]
    assert sum((1 + length) * count for length, count in enumerate(by_len)) == stats["num_verified_rows"]
    assert min(by_len) >= 0
    resumed = run.total("num_preemptions")
    assert stats["num_preemptions"] == resumed
    assert (resumed > 0) == (capacity == "MAX_UTILIZATION")
    assert stats["num_oracle_rows"] == run.watcher.num_decoded
    assert sorted(map(id, run.watcher.ended)) == sorted(map(id, run.requests))
    if policy == "off":
        assert stats["num_oracle_rows"] == stats["num_verified_rows"] == by_len[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_latencies_are_those_the_sinks_saw(policy):
    run = Run(Setup(policy=policy, max_batch_size=3), some_requests(2))
    gaps = [b - a for times in run.token_times.values() for a, b in pairwise(times)]
    assert sum(run.series("inter_token_latency_s")) == len(gaps)
    assert sum(run.series("inter_token_latency_s_sum")) == pytest.approx(sum(gaps))
    firsts = [times[0] for times in run.token_times.values()]  # all arrive at time 0
    assert sum(run.series("time_to_first_token_s")) == len(firsts) == 12
    assert sum(run.series("time_to_first_token_s_sum")) == pytest.approx(sum(firsts))
    queued = [request.stats.first_scheduled_s for request in run.requests]
    assert sum(run.series("queue_time_s_sum")) == pytest.approx(sum(queued))
    assert max(queued) > 0.0, "12 requests do not fit into 3 slots"
    ends = [times[-1] for times in run.token_times.values()]
    assert sum(run.series("e2e_latency_s_sum")) == pytest.approx(sum(ends))
    assert sum(run.series("output_token_len_sum")) == sum(request.num_output_tokens for request in run.requests)
    assert sum(run.series("input_token_len_sum")) == sum(request.prompt_len for request in run.requests)
    several = [r for r in run.requests if r.num_output_tokens > 1]
    assert sum(run.series("time_per_output_token_s")) == len(several)


def test_cancelled_requests_leave_nothing_behind_and_have_no_end_to_end_time():
    requests = some_requests(3)
    requests[0] = ([1, 2], SamplingParams(max_tokens=50))
    run = Run(Setup(policy="fixed:3", max_batch_size=2), requests, cancel=("0", "11"))
    assert run.collector.reasons["0"] == run.collector.reasons["11"] == "cancelled"
    assert sum(run.series("e2e_latency_s")) == sum(run.series("output_token_len")) == 10
    assert sum(run.series("time_to_first_token_s")) == 11, "the one that was cancelled in the queue had no token"
    assert run.stats["num_finished_requests"] == 12
    assert run.stats["num_prompt_tokens"] == sum(len(prompt) for prompt, _ in requests[:11]), (
        "and its prompt is not read"
    )
    assert not run.executor._stats._last_token_s
    assert not run.executor._stats._ended


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_requests_are_forgotten_when_the_last_one_ends(policy, is_cancelled):
    """They hold their guides, tokens, log probs and logits; the last step's counts stay."""
    executor, alive = Setup(policy=policy, max_batch_size=3).open(), weakref.WeakSet()
    for name in "abc":
        executor.submit(name, [1, 2, 3], SamplingParams(max_tokens=20), lambda output: alive.add(output.request))
    for _ in range(6):
        executor.step()
    assert len(alive) == 3
    if is_cancelled:
        for name in "abc":
            executor.cancel(name)
    while executor.step():
        pass
    deadline_s = time.monotonic() + 20
    while alive:  # the draft thread may still return from its last call
        gc.collect()
        assert time.monotonic() < deadline_s
    assert executor.stats()["num_generation_requests"] > 0
    executor.close()


def test_the_last_request_may_end_while_another_thread_asks():
    """rest() comes between two reads of the last step."""
    stats, records = ExecutorStats(4), []

    class Kept(StepWatcher):
        def step(self, record):
            records.append(record)

    class Ending:
        is_armed = False

        def __getattr__(self, name):
            if self.is_armed:
                self.is_armed = False
                stats.rest()
            return getattr(records[0], name)

    executor, ending = Setup(policy="fixed:2").open(), Ending()
    executor.watch(Kept())
    executor.submit("a", [1, 2], SamplingParams(max_tokens=4), Collector().sink("a"))
    executor.step()
    executor.close()
    stats.step(ending)
    ending.is_armed = True
    assert stats.as_dict()["num_scheduled"] == 1


def test_prefix_hits_are_counted_in_tokens():
    setup = Setup(policy="fixed:2", tokens_per_block=2)
    executor, collector = setup.open(), Collector()
    for name in "ab":
        executor.submit(name, [1, 2, 3, 4, 1, 2, 3], SamplingParams(max_tokens=4), collector.sink(name))
        while executor.step():
            pass
    stats = executor.stats()
    executor.close()
    assert (stats["num_prefix_tokens"], stats["num_prefix_hit_tokens"]) == (14, 6)


def test_the_last_step_is_described():
    setup = Setup(policy="fixed:2", max_num_tokens=10, chunk_unit_size=2)
    executor, collector = setup.open(), Collector()
    names = ("num_scheduled", "num_context_requests", "num_generation_requests", "num_context_tokens")
    assert [executor.stats()[name] for name in names] == [0, 0, 0, 0]
    executor.submit("a", [1, 2, 3], SamplingParams(max_tokens=30), collector.sink("a"))
    executor.step()
    assert [executor.stats()[name] for name in names] == [1, 1, 0, 3]
    executor.submit("b", [1] * 20, SamplingParams(max_tokens=3), collector.sink("b"))
    executor.step()
    scheduled, context, generation, tokens = (executor.stats()[name] for name in names)
    assert (scheduled, context, generation) == (2, 1, 1)
    assert 0 < tokens < 10
    executor.close()


def test_values_fall_into_the_bucket_whose_bound_they_reach():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 2]
    assert histogram.sums == [1.5, 3.5, 7.0]


def test_a_value_that_came_several_times_is_that_many_values():
    one_by_one, together = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for value, num_values in ((0.5, 3), (2.0, 1), (4.0, 2)):
        together.observe(value, num_values)
        for _ in range(num_values):
            one_by_one.observe(value)
    assert (together.counts, together.sums) == (one_by_one.counts, one_by_one.sums)


def test_bounds_grow():
    for bounds in HISTOGRAMS.values():
        assert list(bounds) == sorted(set(bounds))


def ended(policy, token_ids, end, by_sink=False):
    """A run of one request that ends with output token number `end`. The target drafts for itself: all drafts pass."""
    table = make_table(16, 3)
    setup = Setup(vocab_size=16, tables=(table, table), policy=policy, doubtful=False)
    executor, collector = setup.open(), Collector()
    params = SamplingParams(max_tokens=40, end_ids=() if by_sink or end is None else (token_ids[end],))
    inner, before = collector.sink("a"), [0, 0, 0]

    def sink(output):
        """End the output like a text request whose stop word is complete with that token."""
        stats = output.request.stats
        num_output, (drafted, accepted) = before[0], before[1:]
        before[:] = output.request.num_output_tokens, stats.num_settled_drafts, stats.num_accepted_tokens
        inner(output)
        place = end + 1 - num_output if by_sink else len(output.new_token_ids) + 1
        if place > len(output.new_token_ids):
            return False
        settled = place if place <= before[2] - accepted else before[1] - drafted
        return OutputEnd(end + 1, drafted + settled, accepted + min(before[2] - accepted, place - 1))

    executor.submit("a", [1, 2, 3], params, sink)
    while executor.step():
        pass
    found = executor.stats()
    executor.close()
    return found, collector.requests["a"], collector.tokens["a"]


@pytest.mark.parametrize("by_sink", [False, True], ids=["end id", "stop word"])
@pytest.mark.parametrize("policy", ["fixed:4", "fixed:2", "fixed:4:draft_ahead", "fixed:4:ping_pong", "erratic"])
def test_counts_end_with_the_output(policy, by_sink):
    """Neither what is generated nor what is accepted depends on drafts that follow the end."""
    _, _, token_ids = ended("off", None, None)
    firsts = [place for place, token in enumerate(token_ids) if token not in token_ids[:place]]
    num_ended_by_draft = 0
    for end in firsts[:12]:
        plain, _, _ = ended("off", token_ids, end, by_sink)
        stats, request, _ = ended(policy, token_ids, end, by_sink)
        assert stats["num_output_tokens"] == plain["num_output_tokens"] == end + 1
        assert stats["num_oracle_rows"] == plain["num_oracle_rows"]
        assert stats["num_accepted_tokens"] == request.stats.num_accepted_tokens <= end
        assert stats["num_draft_tokens"] == request.stats.num_draft_tokens <= end + 1
        per_pos = [stats[f"num_accepted_tokens_per_pos[{place}]"] for place in range(4)]
        assert sum(per_pos) == request.stats.num_accepted_tokens
        assert request.num_output_tokens == end + by_sink
        assert sum(stats[f"output_token_len_sum[{i}]"] for i in range(6)) == end + by_sink
        num_ended_by_draft += request.stats.num_draft_tokens - request.stats.num_accepted_tokens
    assert num_ended_by_draft


@pytest.mark.parametrize("policy", ["off", "fixed:4", "fixed:4:draft_ahead", "fixed:4:ping_pong"])
def test_a_step_after_the_end_is_not_counted(policy):
    """A sink that finds the end while the next step runs: nothing of that step is output."""
    table = make_table(16, 3)
    executor, collector = Setup(vocab_size=16, tables=(table, table), policy=policy, doubtful=False).open(), Collector()
    counts, ends = ("num_output_tokens", "num_accepted_tokens", "num_draft_tokens"), []

    def sink(output):
        request = output.request
        collector.requests["a"] = request
        if ends:
            return ends[0]
        if request.num_output_tokens > 4:
            stats = request.stats
            ends.append(OutputEnd(request.num_output_tokens, stats.num_settled_drafts, stats.num_accepted_tokens))
        return False

    executor.submit("a", [1, 2, 3], SamplingParams(max_tokens=40), sink)
    while executor.step():
        pass
    found, request = executor.stats(), collector.requests["a"]
    executor.close()
    expected = (ends[0].num_output_tokens, ends[0].num_accepted_tokens, ends[0].num_draft_tokens)
    assert tuple(found[name] for name in counts) == expected
    assert (request.num_output_tokens, request.stats.num_accepted_tokens, request.stats.num_draft_tokens) == expected
