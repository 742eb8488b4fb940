"""Guides that take long do not stretch the steps of others: their requests take turns, with the same text."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.stats import StepWatcher
from faser_trtllm.scheduler.guide_budget import MAX_GUIDE_MS
from tests.support.effort import examples
from tests.support.executor_harness import Collector, Setup
from tests.support.random_setups import VOCAB, prompts, setups
from tests.support.toy_guide import ToyGuide, ToyState

END = 4
MASK_MS = 4.0
NUM_GUIDED, NUM_PLAIN = 16, 3
ROOMY = {"max_batch_size": 24, "max_num_tokens": 400, "num_blocks": 600, "vocab_size": VOCAB}


class CostlyGuide(ToyGuide):
    """Each mask takes `ms` of the setup's clock, from a position of the output on."""

    setup, ms, first = None, 0.0, 0

    def start(self, end_ids):
        return CostlyState(self, tuple(end_ids))


class CostlyState(ToyState):
    def fill(self, mask):
        if len(self._path) > self._guide.first:
            self._guide.setup.clock.advance(self._guide.ms / 1e3)
        super().fill(mask)


class Steps(StepWatcher):
    """Records the ids of each step's requests."""

    def __init__(self):
        self.ids = []

    def step(self, record):
        self.ids.append({request.request_id for request in record.plan.scheduled.requests})

    def finished(self, request):
        pass


def costly(setup, seed, ms):
    guide = CostlyGuide.random(VOCAB, seed, END)
    guide.setup, guide.ms = setup, ms
    return guide


def run(setup, requests, arrivals=None):
    """Run the requests; return texts and reasons, the ids of each step's requests, and the clock's ms of each step."""
    collector, steps, times_ms = Collector(), Steps(), []
    with setup.open() as executor:
        executor.watch(steps)
        waiting = sorted(
            zip(arrivals or [0] * len(requests), itertools.count(), requests, strict=False), key=lambda item: item[:2]
        )
        for number in itertools.count():
            while waiting and waiting[0][0] <= number:
                _, index, (prompt, params) = waiting.pop(0)
                executor.submit(str(index), prompt, params, collector.sink(str(index)))
            begun_s = setup.clock.now_s()
            is_busy = executor.step()
            times_ms.append(1e3 * (setup.clock.now_s() - begun_s))
            executor.check_integrity()
            assert number < 20_000, "the executor does not come to an end"
            if not is_busy and not waiting:
                break
    return (collector.tokens, collector.reasons), steps.ids, times_ms


def crowd(setup, ms, max_tokens=12):
    """Sequences of one guide without an end, then others without a guide."""
    guide = costly(setup, 8, ms)
    guided = SamplingParams(max_tokens=max_tokens, temperature=1.0, guide=guide)
    plain = SamplingParams(max_tokens=40, temperature=1.0)
    params = [guided] * NUM_GUIDED + [plain] * NUM_PLAIN
    return [([2, 1, 3], replace(each, seed=seed)) for seed, each in enumerate(params)]


POLICIES = ["off", "fixed:3", "fixed:2:draft_ahead", "price"]


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_without_a_guide_are_in_every_step(policy):
    setup = Setup(policy=policy, **ROOMY)
    (tokens, _), ids, _ = run(setup, crowd(setup, MASK_MS))
    for name in map(str, range(NUM_GUIDED, NUM_GUIDED + NUM_PLAIN)):
        mine = [number for number, step in enumerate(ids) if name in step]
        assert mine == list(range(mine[-1] + 1)), "from the first step to its end"
        assert len(tokens[name]) == 40


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_takes_the_budget_and_one_request_more_at_most(policy):
    """The masks of all in one step would take 64 ms, with drafts up to 256."""
    setup = Setup(policy=policy, **ROOMY)
    _, _, times_ms = run(setup, crowd(setup, MASK_MS))
    num_masks = 1 if policy == "off" else 1 + setup.max_draft_len
    assert max(times_ms) <= MAX_GUIDE_MS + num_masks * MASK_MS
    assert sum(times_ms) > 4 * MAX_GUIDE_MS, "or the budget was never short"


@pytest.mark.parametrize("policy", [*POLICIES, "fixed:3:ping_pong"])
def test_nobody_is_left_out_longer_than_all_take_together(policy):
    setup = Setup(policy=policy, **ROOMY)
    (_, reasons), ids, _ = run(setup, crowd(setup, MASK_MS))
    assert len(reasons) == NUM_GUIDED + NUM_PLAIN
    num_masks = 1 if policy == "off" else 1 + setup.max_draft_len
    most = math.ceil(NUM_GUIDED * num_masks * MASK_MS / MAX_GUIDE_MS)
    was_short = False
    for name in map(str, range(NUM_GUIDED)):
        mine = [-1] + [number for number, step in enumerate(ids) if name in step]
        waits = [after - before - 1 for before, after in itertools.pairwise(mine)]
        was_short |= max(waits) > 0
        assert max(waits) <= most
    assert was_short


def test_a_mask_beyond_the_budget_runs_alone():
    setup = Setup(policy="fixed:3", **ROOMY)
    guide = costly(setup, 8, 3 * MAX_GUIDE_MS)
    params = SamplingParams(max_tokens=5, guide=guide)
    (tokens, _), ids, _ = run(setup, [([2, 1], params)] * 4)
    assert all(len(text) == 5 for text in tokens.values())
    assert all(len(step) == 1 for step in ids[1:]), "in the first step nobody knows what a mask takes"


def test_the_rows_of_those_left_out_are_for_the_prompt_whose_turn_it_is():
    """Without chunking it needs 14 of 16 rows; a step without any request would be lost."""
    setup = Setup(policy="off", **ROOMY | {"max_num_tokens": 16, "max_batch_size": 8}, chunked=False)
    params = SamplingParams(max_tokens=8, guide=costly(setup, 8, MAX_GUIDE_MS + 1))
    _, ids, _ = run(setup, [([2, 1], params)] * 6 + [([2, 1, 3] * 4 + [2, 1], params)], [0] * 6 + [8])
    assert all(ids)


def test_siblings_that_join_later_are_counted_from_their_first_mask():
    setup = Setup(policy="off", **ROOMY)
    params = SamplingParams(max_tokens=3, guide=costly(setup, 8, MAX_GUIDE_MS + 1))
    _, ids, _ = run(setup, [([2, 1], params)] * 6, [0, 1, 1, 1, 1, 1])
    assert all(len(step) == 1 for step in ids)


def test_a_guide_that_gets_slow_stretches_one_step():
    """Until the guide gets slow a plan is held, since all requests decode."""
    setup = Setup(policy="off", **ROOMY)
    guide = costly(setup, 8, MASK_MS)
    guide.first = 6
    _, _, times_ms = run(setup, [([2, 1], SamplingParams(max_tokens=12, guide=guide))] * NUM_GUIDED)
    assert [ms for ms in times_ms if ms > MAX_GUIDE_MS + MASK_MS] == [pytest.approx(NUM_GUIDED * MASK_MS)]


@settings(max_examples=examples(60))
@given(setup=setups(), data=st.data())
def test_the_text_is_that_of_guides_that_cost_nothing(setup, data):
    drawn, arrivals = [], []
    for _ in range(data.draw(st.integers(2, 10))):
        params = SamplingParams(
            max_tokens=data.draw(st.integers(1, 30)),
            temperature=data.draw(st.sampled_from([0.5, 1.0, 2.0])),
            seed=data.draw(st.integers(0, 2**64 - 1)),
            end_ids=data.draw(st.sampled_from([(), (END,)])),
        )
        seed, ms = data.draw(st.integers(0, 50)), data.draw(st.sampled_from([None, 0.1, 3.0, 12.0, 50.0]))
        drawn.append((data.draw(prompts), params, seed, ms))
        arrivals.append(data.draw(st.integers(0, 12)))

    def texts(factor):
        guides = [ms and costly(setup, seed, factor * ms) for _, _, seed, ms in drawn]
        return run(
            setup, [(d[0], replace(d[1], guide=guide)) for d, guide in zip(drawn, guides, strict=True)], arrivals
        )[0]

    assert texts(1.0) == texts(0.0)
