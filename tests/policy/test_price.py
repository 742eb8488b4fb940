"""The price in a simulated world: pays, backs off, stays within limits, and is never far below its baselines."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.core.cost_table import CostSample, CostTable, ExitModel, Fingerprint, Interference
from faser_trtllm.policy.base import ExitView, StepView
from faser_trtllm.policy.controller import _Belief, _class_of
from faser_trtllm.policy.price import MARGINS, PricePolicy
from faser_trtllm.policy.registry import make_policy
from tests.policy.world import ROWS, World, constant, cost_table, draft_ms, logistic, request, target_ms


def _goodput(spelling, batch_size, acceptance, *, warm_up=1200, steps=1500, **world):
    made = World(make_policy(spelling, 8, cost_table(), 32), batch_size, acceptance, noise=0.05, **world)
    made.run(warm_up)
    return made.run(steps)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("acceptance", [constant(0.0), constant(0.0, margin=15.0), constant(0.2)])
def test_bad_drafts_cost_less_than_three_percent(batch_size, acceptance):
    """Also where the draft is sure of itself and always wrong."""
    off = _goodput("off", batch_size, acceptance)
    assert _goodput("price", batch_size, acceptance) > 0.97 * off


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("acceptance", [constant(0.8), logistic(1.2, -1.2), logistic(1.0, 0.8)])
def test_never_three_percent_below_any_uniform_length(batch_size, acceptance):
    best = max(_goodput(spelling, batch_size, acceptance) for spelling in ("off", "fixed:2", "fixed:4", "fixed:6"))
    assert _goodput("price", batch_size, acceptance) > 0.97 * best


@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("acceptance", [constant(0.45), constant(0.75)])
def test_a_machine_whose_speed_changes_does_not_mislead_it(batch_size, acceptance):
    """Up to 1.7 times slower for seconds at a time, whatever happens to run then."""
    best = max(_goodput(spelling, batch_size, acceptance) for spelling in ("off", "fixed:2", "fixed:4"))
    assert _goodput("price", batch_size, acceptance, mood=1.7, steps=4000) > 0.97 * best


def test_requests_that_differ_are_worth_more_than_the_best_schedule():
    def mixed(rng, index, place):
        return 1.0, 0.9 if index % 2 else 0.3

    assert _goodput("price", 8, mixed) > 1.02 * _goodput("schedule", 8, mixed)


def test_a_wrong_cost_table_is_found_out():
    """Drafting is ten times as slow as the table says: the measured times win."""

    def slow(n):
        return 10 * draft_ms(n)

    off = _goodput("off", 1, constant(0.3), draft=slow)
    assert _goodput("price", 1, constant(0.3), draft=slow) > 0.97 * off


def test_drafting_resumes_when_drafts_become_good():
    quality = [0.0]
    world = World(PricePolicy(8, cost_table(), 32), 4, lambda rng, i, j: (1.0, quality[0]))
    world.run(500)
    assert sum(map(sum, world.drafted_lengths[-50:])) < 50
    quality[0] = 0.9
    world.run(3000)
    assert np.mean(world.drafted_lengths[-50:]) > 1.5


@settings(max_examples=25, deadline=None)
@given(
    batch_size=st.integers(1, 12),
    rate=st.floats(0.0, 1.0),
    max_draft_len=st.integers(1, 8),
    waiting=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_lengths_stay_within_limits(batch_size, rate, max_draft_len, waiting, seed):
    policy = PricePolicy(max_draft_len, cost_table(), 16)
    world = World(
        policy, batch_size, logistic(1.0, 8 * rate - 4), max_draft_len=max_draft_len, num_waiting=waiting, seed=seed
    )
    world.run(60)  # the world checks 0 <= verified <= pending
    assert max(max(lengths) for lengths in world.drafted_lengths) <= max_draft_len


def _hopeless(num_requests=2):
    """A policy for which drafting can never pay, and its requests."""
    policy = make_policy("price", 8, cost_table(draft=lambda requests: 100.0), 32)
    return policy, [request(str(i), slot=i) for i in range(num_requests)]


def test_probes_wait_for_prompts_to_pass():
    """The draft model would run the prompt, too, for a few drafts that only serve to learn."""
    policy, requests = _hopeless()
    for num_context_rows in (0, 64, 0, 64):
        lengths = policy.plan(StepView(requests, num_context_rows, 0, 0.0)).lengths
        assert any(lengths) == (num_context_rows == 0)


def test_a_new_policy_that_drafts_nothing_does_not_look_at_every_step():
    policy, requests = _hopeless()
    policy.plan(StepView(requests, 64, 0, 0.0))
    assert sum(policy.wants_outcome(False) for _ in range(320)) <= 20
    assert sum(policy.wants_outcome(True) for _ in range(320)) == 320


def test_waiting_prompts_make_drafts_dearer():
    world = World(PricePolicy(8, cost_table(), 32), 4, constant(0.7))
    world.run(300)
    decoding = list(world.requests)
    slots, prices = [], []
    for num_context_rows, num_waiting in ((0, 0), (64, 5)):
        view = StepView(decoding, num_context_rows, num_waiting, world.now_s)
        costs = world.policy._costs.costs(4, 4 + num_context_rows, 64)
        choice, _ = world.policy._choose(view, costs, 4.0 + (num_context_rows if num_waiting else 0))
        slots.append(choice.num_slots)
        prices.append(choice.goodput)
    assert slots[1] < slots[0]
    assert prices[1] > prices[0]


def test_a_request_near_its_deadline_gets_the_slots():
    policy = PricePolicy(8, cost_table(), 32)
    world = World(policy, 4, constant(0.75))
    world.run(400)
    urgent = world.requests[2]
    urgent.deadline_s = world.now_s + 0.001
    weights = policy._weights(StepView(world.requests, 0, 0, world.now_s))
    assert weights.argmax() == 2
    assert weights.mean() == pytest.approx(1.0)


def _with_exits(pays):
    samples = [CostSample("verify", n, 1, 64, target_ms(n)) for n in ROWS]
    samples += [CostSample("draft_step", n, n, 64, draft_ms(n)) for n in (1, 8, 32)]
    samples += [
        CostSample(f"segment:{i}", n, 1, 64, s * target_ms(n)) for i, s in enumerate((0.25, 0.75)) for n in ROWS
    ]
    exits = [ExitModel(1, -2.0, -1.0, 1.0, 1.5, pays=pays)]
    return CostTable.fit(samples, Fingerprint("test", "test", 2, "test"), exits=exits)


@pytest.mark.parametrize(
    ("prune", "pays", "looks"), [("auto", False, 0), ("auto", True, 1), ("off", True, 0), ("on", False, 1)]
)
def test_rows_are_looked_at_only_where_the_profile_says_so(prune, pays, looks):
    policy = PricePolicy(8, _with_exits(pays), 32, prune=prune)
    world = World(policy, 8, logistic(1.0, 1.0))
    world.run(400)
    view = StepView(list(world.requests), 0, 0, world.now_s)
    policy.plan(view)
    assert len(policy.exit_boundaries(view, 48)) == looks


def test_a_doubted_draft_loses_its_row_and_all_behind_it_and_none_before():
    policy = PricePolicy(8, _with_exits(True), 32, prune="on")
    world = World(policy, 8, logistic(1.0, 1.0))
    world.run(400)
    view = StepView(list(world.requests), 0, 0, world.now_s)
    policy.plan(view)
    for r in world.requests:
        r.draft_margins[r.num_tokens : r.num_tokens + 4] = 5.0
    rank = [np.zeros(4, np.int32) for _ in range(8)]
    gap = [np.zeros(4, np.float32) for _ in range(8)]
    rank[3][1], gap[3][1] = 8, 9.0
    kept = policy.keep_rows(view, ExitView(1, [5] * 8, rank, gap, 0))
    assert kept[3] == 2  # the last committed token's row and the first draft's, which tests the second
    assert all(1 <= k <= 5 for k in kept)
    later = [r.copy() for r in rank]
    later[3][3] = 8
    assert policy.keep_rows(view, ExitView(1, [5] * 8, later, gap, 0))[3] == 2


def test_overlap_is_predicted_only_from_measured_lanes():
    serial = make_policy("price", 8, cost_table(), 32)
    world = World(serial, 4, constant(0.8))
    world.run(200)  # the world asserts that every plan is serial
    samples = [CostSample("verify", n, 1, 64, target_ms(n), p) for n in ROWS for p in ("all", "verify")]
    samples += [CostSample("draft_step", n, n, 64, 0.8, p) for n in (1, 8, 32) for p in ("all", "draft")]
    table = CostTable.fit(
        samples, Fingerprint("test", "test", 2, "test"), interference=[Interference("draft", "verify", 1.0, 1.0)]
    )
    policy = PricePolicy(8, table, 32, mode="ping_pong")
    assert policy.plan(StepView([request("a"), request("b", slot=1)], 0, 0, 0.0)).mode.value in ("serial", "ping_pong")


def test_a_newcomer_counts_from_before_its_prompt():
    """Three requests and one that joins them are decided as four: what is known of four holds while its prompt runs."""
    world = World(PricePolicy(8, cost_table(), 32), 4, logistic(1.0, 0.5))
    world.run(200)  # past the warm-up, in which something is drafted whatever the estimate says
    policy, requests = world.policy, world.requests
    policy.controller._classes.clear()
    at_four = policy.controller._class(_class_of(4))  # there, drafting does not keep its promise
    for arm in ("price", "uniform"):
        at_four.arms[arm] = _Belief(1e-9, mean=-3.0)
    policy.controller._tried.update(MARGINS)
    lengths = []
    for step in range(50):
        lengths.append(policy.plan(StepView(requests, 0, 0, world.now_s + step)).lengths)
        policy.wants_outcome(False)
    assert lengths[-1] == [0] * 4
    joined = policy.plan(StepView(requests[:3], 0, 1, 0.0, 1))
    assert joined.lengths == [0, 0, 0]
    assert any(policy.plan(StepView(requests[:3], 0, 0, 0.0)).lengths)


@pytest.mark.parametrize("size", [2, 12, 13])
def test_a_plan_that_lost_one_of_many_like_it_keeps_its_price(size):
    """The price follows what few requests are expected to bring; whether they are few is the plan's, not the step's."""
    policy = PricePolicy(8, cost_table(target=lambda rows: 5.0), 32)
    world = World(policy, 4, constant(0.9), target=lambda rows: 5.0)
    world.run(1000)
    many = [request(f"m{i}", slot=i % 32) for i in range(size)]
    policy._plan_tokens *= 3.0  # of an older plan, for better requests
    for _ in range(3):  # past a trial
        policy._expire()
        policy.plan(StepView(many, 0, 0, world.now_s))
    assert policy._drafting
    before, stop = policy.price, policy._plan.stop
    held = policy.plan(StepView([*many[1:], request("n")] if size == 2 else many[1:], 0, 0, world.now_s))
    assert policy.price == pytest.approx(before, rel=0.05)
    if stop is not None:
        assert held.stop.row_price == pytest.approx(stop.row_price, rel=0.05)


def test_no_time_is_taken_of_a_plan_that_drafts_nothing_while_drafts_are_pending():
    """It is learnt as the plan ends, when those may still be untested, and tells how many of them got a row."""
    policy = PricePolicy(8, cost_table(), 32)
    World(policy, 2, constant(0.0)).run(500)
    requests = [request(str(i), slot=i) for i in range(2)]
    opened = {}
    for num_drafts in (3, 0):
        requests[0].num_drafts = num_drafts
        policy._expire()
        for step in range(20):
            policy.plan(StepView(requests, 0, 0, 100.0 + 0.01 * step + num_drafts, num_generated=2 * step))
            policy.wants_outcome(False)
        assert not policy._drafting
        opened[num_drafts] = policy._period.is_open
    assert opened == {3: False, 0: True}


def test_steps_that_fail_for_somebody_tell_nothing_of_steps():
    """Of two requests, one gets no token in the only step of a plan that drafts nothing."""
    policy = PricePolicy(8, cost_table(), 32)
    world = World(policy, 2, constant(0.0))
    world.run(500)
    while policy._drafting or policy.controller.is_trial or not policy._period.is_open:
        world.step()
    policy._expire()
    begun = StepView(world.requests, 0, 0, world.now_s, num_generated=world.num_tokens)
    policy.plan(begun)
    policy._expire()
    ended = StepView(world.requests, 0, 0, world.now_s + 0.001, num_generated=world.num_tokens + 1)
    assert len(policy.plan(ended).lengths) == 2


def test_last_tokens_decide_nothing():
    """A request that may draft no more is no reason to give drafting up for those that come after it."""
    policy = PricePolicy(8, cost_table(), 32)
    World(policy, 4, logistic(1.0, 0.5)).run(200)  # past the warm-up
    policy.controller._tried.update(MARGINS)  # no early trial falls into the next two plans
    ending, fresh = request("ending", max_draft_len=0), request("fresh")
    assert policy.plan(StepView([ending], 0, 0, 0.0)).lengths == [0]
    assert policy.plan(StepView([fresh], 0, 0, 0.1)).lengths[0] > 3  # no mere probe
