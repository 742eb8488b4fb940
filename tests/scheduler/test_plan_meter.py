"""Tests of the statistics that a policy gets about the steps of its plans."""

import numpy as np
import pytest

from faser_trtllm import native
from faser_trtllm.core.decision import StepView
from faser_trtllm.core.plan import (
    DraftResult,
    ScheduledRequest,
    ScheduledRequests,
    SchedulerOutput,
    StepRecord,
    VerifyResult,
)
from faser_trtllm.core.request import Request
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.policy.base import Decision
from faser_trtllm.scheduler.plan_meter import SKIPPED_STEPS, PlanMeter
from tests.support.columns import columns
from tests.support.executor_harness import Setup, run
from tests.support.toy_engine import ToyEngine


class Listener:
    """Two drafts for everybody, a new plan for every step; keeps what it is told."""

    name = "listener"

    def __init__(self) -> None:
        self.stats = []

    def plan(self, view):
        return Decision([2] * len(view.decoding))

    def observe(self, stats):
        self.stats.append(stats)


@pytest.mark.parametrize("chunk", [64, 2])
def test_steps_that_run_prompts_are_counted_and_their_rows_are_told_apart(chunk):
    setup, listener = Setup(max_num_tokens=chunk + 12, reuse=False), Listener()
    setup.policy, setup.make_policy = "listener", lambda: listener
    prompts = [([1] * length, SamplingParams(max_tokens=30)) for length in (3, 5, 14)]
    collector = run(setup, prompts, arrivals=[0, 8, 12])
    beside = [stats for stats in listener.stats if stats.num_context_rows]
    assert sum(stats.num_context_rows for stats in beside) == 5 + 14
    assert all(stats.num_steps == 1 for stats in beside)
    assert {stats.num_requests for stats in beside} == {1, 2}
    # A prompt's own token is not the decoding requests'; a step drafts two and so yields three at most.
    for stats in listener.stats:
        assert stats.num_requests <= stats.num_tokens <= 3 * stats.num_requests
        assert stats.num_rows == stats.num_requests + stats.num_verified
    # All but the prompts' own, and those of steps that do not count: without decoding, or right behind a beginning.
    num_tokens = sum(map(len, collector.tokens.values()))
    assert num_tokens - 3 - 2 * 3 <= sum(stats.num_tokens for stats in listener.stats) <= num_tokens - 3


def stats_of(drafts, model_lengths=None, max_draft_rows=2):
    """Return the statistics of steps with two requests, run until they are counted."""
    requests = [Request(str(i), [1, 2], SamplingParams(max_tokens=9), max_seq_len=16, max_draft_len=5) for i in (0, 1)]
    for request in requests:
        request.num_computed_tokens = 1
    plan = SchedulerOutput(
        ScheduledRequests.of([ScheduledRequest(request, 1, 5, 5) for request in requests]),
        StepView(requests, 0, 0, 0.0),
        Decision([5, 5], model_lengths=model_lengths),
    )
    result = VerifyResult(np.ones((2, 1), np.int32), *columns([1, 1], [0, 0], [native.RECOVERED] * 2, [5, 3]))
    meter = PlanMeter(max_draft_rows)
    for step in range(SKIPPED_STEPS + 1):
        meter.begin_step(float(step))
        meter.note(StepRecord.of(plan, drafts, result, (float(step),) * 4))
    meter.begin_step(9.0)
    return meter.take()


def test_free_drafts_are_not_the_draft_models():
    stats = stats_of(
        DraftResult(*columns([5, 3], [2, 2]), 1.0, num_rows=2, num_asked=2, num_free=np.array([4, 0], np.int32))
    )
    assert (stats.num_draft_calls, stats.num_draft_steps, stats.num_drafted) == (1, 3, 4)
    assert stats.num_verified == 8


def test_without_a_draft_call_there_are_no_draft_steps():
    stats = stats_of(DraftResult(*columns([5, 3], [2, 2]), num_free=np.array([5, 3], np.int32)), model_lengths={})
    assert (stats.num_draft_calls, stats.num_draft_steps, stats.num_drafted) == (0, 0, 0)
    assert stats.num_rows == 10


@pytest.mark.parametrize("is_mixture", [True, False])
def test_the_experts_of_all_passes_are_summed(is_mixture):
    setup, listener = Setup(is_mixture=is_mixture, reuse=False), Listener()
    setup.policy, setup.make_policy = "listener", lambda: listener
    run(setup, [([1] * 3, SamplingParams(max_tokens=30)), ([2] * 5, SamplingParams(max_tokens=30))])
    for stats in listener.stats:
        rows = stats.num_rows + stats.num_context_rows
        top_k = ToyEngine.TOP_K
        assert (top_k * stats.num_steps <= stats.num_experts <= top_k * rows) if is_mixture else not stats.num_experts


@pytest.mark.parametrize("drafters", ["model", "head", "medusa", "block"])
def test_steps_count_whatever_the_draft_has_to_run_again(drafters):
    """All drafts are accepted, so a head runs three rows per step of what the target has run."""
    setup, listener = Setup(drafters=drafters, noise=0.0, max_batch_size=1), Listener()
    setup.policy, setup.make_policy = "listener", lambda: listener
    run(setup, [([1] * 3, SamplingParams(max_tokens=40))])
    num_steps = sum(stats.num_steps for stats in listener.stats)
    num_tokens = sum(stats.num_tokens for stats in listener.stats)
    assert num_steps >= 40 // 3 - SKIPPED_STEPS - 2
    if drafters in ("model", "head"):
        assert num_tokens >= 3 * (num_steps - 1)
