"""The price in a simulated world: pays, backs off, stays within limits, and is never far below its baselines."""

from dataclasses import replace
from itertools import cycle, groupby, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm import native
from faser_trtllm.core.cost_table import CostSample, CostTable, ExitModel, Fingerprint, Interference
from faser_trtllm.ops.prune_rows import PruneBatch, prune_rows_reference
from faser_trtllm.policy.base import HELD_STEPS, Mode, PlanStats, StepView
from faser_trtllm.policy.price import RETRY_REQUESTS, PricePolicy
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.sampling.table import SamplingTable
from tests.policy.world import ROWS, World, constant, cost_table, draft_ms, logistic, request, target_ms
from tests.support.columns import columns
from tests.support.effort import pick
from tests.support.executor_harness import toy_costs

pytestmark = pytest.mark.slow


def _goodput(spelling, batch_size, acceptance, *, warm_up=1200, steps=1500, **world):
    made = World(make_policy(spelling, 8, cost_table(), 32), batch_size, acceptance, noise=0.05, **world)
    made.run(warm_up)
    return made.run(steps)


def _pairs(batch_sizes, acceptances):
    """Each of both at least once, or everything: every batch size with every acceptance."""
    return pick(list(zip(cycle(batch_sizes), acceptances, strict=False)), list(product(batch_sizes, acceptances)))


@pytest.mark.parametrize(
    ("batch_size", "acceptance"), _pairs([1, 4, 16], [constant(0.0), constant(0.0, margin=15.0), constant(0.2)])
)
def test_bad_drafts_cost_less_than_three_percent(batch_size, acceptance):
    """Also where the draft is sure of itself and always wrong."""
    off = _goodput("off", batch_size, acceptance)
    assert _goodput("price", batch_size, acceptance) > 0.97 * off


@pytest.mark.parametrize(
    ("batch_size", "acceptance"), _pairs([1, 8], [constant(0.8), logistic(1.2, -1.2), logistic(1.0, 0.8)])
)
def test_never_three_percent_below_any_uniform_length(batch_size, acceptance):
    best = max(_goodput(spelling, batch_size, acceptance) for spelling in ("off", "fixed:2", "fixed:4", "fixed:6"))
    assert _goodput("price", batch_size, acceptance) > 0.97 * best


@pytest.mark.parametrize(
    ("batch_size", "acceptance"), _pairs([1, 4, *pick([], [16])], [constant(0.45), constant(0.75)])
)
def test_a_machine_whose_speed_changes_does_not_mislead_it(batch_size, acceptance):
    """Up to 1.7 times slower for seconds at a time, whatever happens to run then."""
    best = max(_goodput(spelling, batch_size, acceptance) for spelling in ("off", "fixed:2", "fixed:4"))
    assert _goodput("price", batch_size, acceptance, slowdown=1.7, steps=4000) > 0.97 * best


def test_margins_that_tell_are_worth_more_than_the_best_schedule():
    def told(rng, index, place):
        is_sure = rng.random() < 0.6
        return (8.0, 0.95) if is_sure else (0.5, 0.2)

    assert _goodput("price", 8, told) > 1.02 * _goodput("schedule", 8, told)


def test_a_wrong_cost_table_is_found_out():
    """Drafting is ten times as slow as the table says: the measured times win."""

    def slow(n):
        return 10 * draft_ms(n)

    off = _goodput("off", 1, constant(0.3), draft=slow)
    assert _goodput("price", 1, constant(0.3), draft=slow) > 0.97 * off


@pytest.mark.parametrize("num_requests", [1, 4, 16])
@pytest.mark.parametrize("part", ["target", "draft", "overhead_ms"])
def test_a_pause_of_the_machine_changes_nothing(num_requests, part):
    """A process that stood still for seconds in a pass, a draft call or on the host is as fast afterwards as before."""
    world = World(make_policy("price", 8, cost_table(), 32), num_requests, constant(0.8), noise=0.03)
    before = world.run(2000)
    usual = getattr(world, part)
    setattr(world, part, usual + 1e4 if part == "overhead_ms" else lambda *given: usual(*given) + 1e4)
    world.step()
    setattr(world, part, usual)
    world.run(100)
    assert world.run(1500) > 0.98 * before


@pytest.mark.parametrize("num_requests", [1, 4])
@pytest.mark.parametrize("part", ["target", "draft", "overhead_ms"])
def test_a_pause_while_a_kind_of_pass_is_new_does_not_end_drafting(num_requests, part):
    def made():
        return World(make_policy("price", 8, cost_table(), 32), num_requests, constant(0.8), noise=0.03)

    world = made()
    world.run(500)
    rate = world.run(1000)
    for num_before in (1, 4, 20):
        world = made()
        world.run(num_before)
        usual = getattr(world, part)
        setattr(world, part, usual + 1e4 if part == "overhead_ms" else lambda *given, usual=usual: usual(*given) + 1e4)
        world.step()
        setattr(world, part, usual)
        world.run(500)
        assert world.run(1000) > 0.98 * rate, num_before


def test_drafting_resumes_when_drafts_become_good():
    quality = [0.0]
    world = World(PricePolicy(8, cost_table(), 32), 4, lambda rng, i, j: (1.0, quality[0]))
    world.run(500)
    assert sum(map(sum, world.drafted_lengths[-50:])) < 50
    quality[0] = 0.9
    world.run(8000)
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


def test_a_plan_without_drafts_stands_for_many_steps():
    world = World(PricePolicy(8, cost_table(), 32), 4, constant(0.0))
    world.run(500)
    before = world.num_plans
    world.run(600)
    assert world.num_plans - before <= 600 / 16 + 2
    assert sum(map(sum, world.drafted_lengths[-600:])) < 0.1 * 600


def test_newcomers_and_their_prompts_do_not_renew_a_plan_without_drafts():
    """They make drafting pay no more than it does. Next to prompts it pays less, which says nothing about later."""
    policy = PricePolicy(8, cost_table(), 32)
    world = World(policy, 4, constant(0.0))
    world.run(500)

    def price(decoding, num_joining=0, later_s=100.0) -> float:
        """Return the plan's price, which falls in every new plan, since the machine gets slower and slower."""
        policy.observe(replace(_steps_beside(0, target_ms, drafts=0), ms=300.0, verify_ms=10.0))
        view = StepView(decoding, 16 * num_joining, 0, world.now_s + later_s, num_joining=num_joining)
        decision = policy.plan(view)
        assert not any(decision.lengths)
        return decision.price

    newcomers = [request(f"new{slot}", slot=slot) for slot in range(4)]
    planned = price(world.requests)
    assert price(world.requests[1:], num_joining=1) == planned
    assert price([*world.requests[1:], newcomers[0]]) == planned
    assert price(newcomers) == planned
    shrunk = price(newcomers[1:])
    assert shrunk != planned
    joining = price(newcomers[1:], num_joining=1)
    assert joining != shrunk
    assert price(newcomers) != joining, "the plan was made next to a prompt"
    ending = price([request("ending", max_tokens=4), *newcomers[1:]], later_s=200.0)
    assert price(newcomers, later_s=200.0) != ending, "one was at its end"


def test_to_find_out_whether_drafting_pays_a_few_requests_draft():
    world = World(PricePolicy(8, cost_table(), 32), 16, constant(0.0))
    world.run(1500)
    drafting = [sum(length > 0 for length in lengths) for lengths in world.drafted_lengths[500:]]
    assert max(drafting) <= RETRY_REQUESTS


def test_a_trial_needs_requests_that_may_draft():
    world = World(PricePolicy(8, cost_table(), 32), 16, constant(0.0))
    for request_of_the_trial in world.requests[::4]:
        request_of_the_trial.max_draft_len = 0
    world.run(1500)
    assert sum(map(any, world.drafted_lengths[:500])) > 0, "drafting was given up, not never begun"
    assert not any(map(any, world.drafted_lengths[1000:]))


def _steps_beside(num_context_rows, target, drafts=2, draft=draft_ms):
    """Return the statistics of a step that runs four requests, with so many drafts each, and prompts as well."""
    rows = 4 * (1 + drafts)
    verify_ms = target(rows + num_context_rows)
    return PlanStats(
        1, verify_ms + drafts * draft(4) + 0.02, drafts * draft(4), verify_ms, num_tokens=10, num_requests=4,
        num_rows=rows, num_verified=4 * drafts, num_draft_calls=int(drafts > 0), num_draft_rows=4 * (drafts > 0),
        num_draft_steps=drafts, num_drafted=4 * drafts, num_context_rows=num_context_rows,
    )  # fmt: skip


def test_a_step_shorter_than_its_prompts_should_be_says_nothing():
    """A machine that is quick once, or a table that is wrong for long passes: drafting goes on as before."""
    policy = PricePolicy(8, cost_table(), 32)
    world = World(policy, 4, logistic(1.0, 0.5))
    rate = world.run(400)
    policy.observe(replace(_steps_beside(200, target_ms), ms=0.3, draft_ms=0.1, verify_ms=10.0))
    assert world.run(400) > 0.97 * rate


@pytest.mark.parametrize(("num_context_rows", "num_waiting"), [(16, 0), (0, 3)])
def test_a_trial_next_to_prompts_or_waiting_requests_is_as_long_as_others(num_context_rows, num_waiting):
    """There is a plan for every step then, but to begin drafting for one step alone would be all cost."""
    world = World(PricePolicy(8, cost_table(), 32), 4, constant(0.0))
    world.run(500)
    drafted = []
    for step in range(6000):
        view = StepView(world.requests, num_context_rows, num_waiting, world.now_s + 10.0 + step)
        drafted.append(any(world.policy.plan(view).lengths))
        world.policy.observe(_steps_beside(num_context_rows, target_ms, drafts=0))
    runs = [len(list(group)) for is_drafted, group in groupby(drafted) if is_drafted]
    assert runs
    assert set(runs[:-1]) <= {HELD_STEPS}


@pytest.mark.parametrize(("dearer_ms", "is_shorter"), [(0.0, False), (0.4, True)])
def test_prompts_count_only_where_rows_get_dearer_behind_them(dearer_ms, is_shorter):
    """The prompts' own time is the same whatever is drafted."""

    def target(rows):
        return 3.0 + 0.02 * rows + dearer_ms * max(0, rows - 48)

    planned = []
    for num_context_rows in (0, 64):
        world = World(PricePolicy(8, cost_table(target), 32), 4, constant(0.7), target=target)
        world.run(300)
        for step in range(200):
            decision = world.policy.plan(StepView(world.requests, num_context_rows, 0, world.now_s + 10.0 + step))
            world.policy.observe(_steps_beside(num_context_rows, target))
        planned.append(sum(decision.lengths))
    assert planned[0] > 0
    assert (planned[1] < planned[0]) == is_shorter


def _with_exits(pays):
    samples = [CostSample("verify", n, 1, 64, target_ms(n)) for n in ROWS]
    samples += [CostSample("draft_step", n, n, 64, draft_ms(n)) for n in (1, 8, 32)]
    samples += [
        CostSample(f"segment:{i}", n, 1, 64, s * target_ms(n)) for i, s in enumerate((0.25, 0.75)) for n in ROWS
    ]
    exits = [ExitModel(1, -2.0, -1.0, 1.0, 1.5, pays=pays)]
    return CostTable.fit(samples, Fingerprint("test", "test", 2, "test"), exits=exits)


def _exits(prune, pays):
    world = World(PricePolicy(8, _with_exits(pays), 32, prune=prune), 8, logistic(1.0, 1.0))
    world.run(400)
    return world, world.held[1].exits


@pytest.mark.parametrize(
    ("prune", "pays", "looks"),
    [("auto", False, False), ("auto", True, True), ("off", True, False), ("on", False, True)],
)
def test_rows_are_looked_at_only_where_the_profile_says_so(prune, pays, looks):
    _, exits = _exits(prune, pays)
    assert (exits is not None and tuple(exits.boundaries) == (1,)) == looks


def test_a_doubted_draft_loses_its_row_and_all_behind_it_and_none_before():
    world, exits = _exits("on", True)
    for r in world.requests:
        r.draft_margins[r.num_tokens : r.num_tokens + 4] = 5.0
    scores = np.tile(np.arange(10, 0, -1, dtype=np.float32), (8, 4, 1))  # the drafts are the best candidates
    scores[3, 1, 0] = 1.0 - 9.0

    def kept():
        places, starts = np.zeros(32, np.int32), np.arange(0, 40, 5, dtype=np.int32)
        slots, known = [r.slot for r in world.requests], [r.num_tokens for r in world.requests]
        rule = exits.rule(world.sampling.array, *columns(slots, known, [4] * 8), 1)
        batch = PruneBatch(starts, np.full(8, 5, np.int32), np.zeros((32, 10), np.int32), places, 40, rule)
        return prune_rows_reference(scores.reshape(32, 10), batch).tolist()

    assert kept()[3] == 2  # the last committed token's row and the first draft's, which tests the second
    assert all(1 <= k <= 5 for k in kept())
    scores[3, 3, 0] = -9.0
    assert kept()[3] == 2


def test_overlap_is_predicted_only_from_measured_lanes():
    World(make_policy("price", 8, cost_table(), 32), 4, constant(0.8)).run(200)  # asserts that every plan is serial
    samples = [CostSample("verify", n, 1, 64, target_ms(n), p) for n in ROWS for p in ("all", "verify")]
    samples += [CostSample("draft_step", n, n, 64, 0.8, p) for n in (1, 8, 32) for p in ("all", "draft")]
    table = CostTable.fit(
        samples, Fingerprint("test", "test", 2, "test"), interference=[Interference("draft", "verify", 1.0, 1.0)]
    )
    policy = PricePolicy(8, table, 32, mode="ping_pong")
    assert policy.plan(StepView([request("a"), request("b", slot=1)], 0, 0, 0.0)).mode.value in ("serial", "ping_pong")


def test_lanes_that_take_turns_are_given_up_when_one_request_is_left():
    """Beside prompts a way of running is tried for many plans, each of which may be for another batch."""
    policy, pair = PricePolicy(8, toy_costs(), 8, mode="auto"), [request("a"), request("b", slot=1)]
    sampling = SamplingTable(2, 4, 8)
    for one in pair:
        sampling.bind(one.slot, one)
    for step in range(3000):
        decision = policy.plan(StepView(pair, 16, 0, float(step)))
        if decision.mode is Mode.PING_PONG:
            break
        drafts = sum(decision.lengths)
        if drafts:
            passed = np.array(decision.lengths, np.int32)
            decision.tested.add(sampling.array, *columns([0, 1], [9, 9], passed, [native.BONUS] * 2))
        policy.observe(_pair_beside(drafts))
    assert decision.mode is Mode.PING_PONG
    assert policy.plan(StepView(pair[:1], 16, 0, step + 1.0)).mode is not Mode.PING_PONG


def _pair_beside(drafts):
    """A step of two requests whose drafts all passed."""
    steps = max(1, drafts // 2)
    counts = {"num_verified": drafts, "num_accepted": drafts, "num_drafted": drafts, "num_pruned": 0}
    calls = {"num_draft_calls": 1, "num_draft_rows": 2, "num_draft_steps": steps} if drafts else {}
    none = {"num_draft_calls": 0, "num_draft_rows": 0, "num_draft_steps": 0}
    times = {"ms": 2.0, "draft_ms": 0.5, "verify_ms": 1.2}
    sizes = {"num_steps": 1, "num_tokens": 2 + drafts, "num_requests": 2, "num_rows": 2 + drafts, "num_context_rows": 0}
    return PlanStats(**sizes, **times, **counts, **none | calls)


def test_a_plan_goes_on_for_a_batch_that_hardly_changed_and_newcomers_get_what_is_usual():
    world = World(PricePolicy(8, cost_table(), 32), 12, constant(0.9))
    world.run(300)
    world.policy._num_steps = 0
    planned = world.policy.plan(StepView(world.requests, 0, 0, world.now_s + 10.0))
    changed = [*world.requests[:-1], request("new", slot=20)]
    again = world.policy.plan(StepView(changed, 0, 0, world.now_s + 10.0))
    assert again.lengths[:-1] == planned.lengths[:-1]
    assert again.lengths[-1] == round(np.mean(planned.lengths))
    assert again.stop is planned.stop


def test_last_tokens_decide_nothing():
    """A request that may draft no more is no reason to give drafting up for those that come after it."""
    policy = PricePolicy(8, cost_table(), 32)
    World(policy, 4, logistic(1.0, 0.5)).run(200)
    policy._num_steps = 0
    ending, fresh = request("ending", max_draft_len=0), request("fresh")
    assert policy.plan(StepView([ending], 0, 0, 100.0)).lengths == [0]
    assert policy.plan(StepView([fresh], 0, 0, 100.1)).lengths[0] > 3


@pytest.mark.parametrize(
    ("spelling", "num_requests", "acceptance", "expected"),
    [
        ("price", 1, logistic(1.0, -1.0), (1154, 1151, 6, 739)),
        ("price", 4, logistic(0.8, -0.5), (2814, 2462, 9, 2601)),
        ("price", 16, constant(0.7), (704, 640, 12, 5187)),
        ("schedule", 4, logistic(0.8, -0.5), (2464, 2464, 19, 2526)),
    ],
)
def test_a_model_without_experts_is_drafted_for_as_before_there_were_any(spelling, num_requests, acceptance, expected):
    """Drafts, verified drafts, plans and tokens of the code before mixtures of experts were priced."""
    world = World(make_policy(spelling, 8, cost_table(), 32), num_requests, acceptance, noise=0.03)
    world.run(300)
    drafted, verified = (sum(map(sum, lengths)) for lengths in (world.drafted_lengths, world.verified_lengths))
    assert (drafted, verified, world.num_plans, world.num_tokens) == expected


def test_a_newcomer_has_no_short_length_from_whoever_had_its_slot():
    """Near its end a request is drafted for up to that, and its slot's next one for as long as others."""
    policy = PricePolicy(8, cost_table(lambda rows: 5.0 + 0.01 * rows, lambda n: 0.01), 4)
    World(policy, 4, logistic(1.0, 4.0)).run(300)
    others = [request(f"r{slot}", slot=slot) for slot in (1, 2, 3)]
    ending, newcomer = request("ending", max_tokens=4, slot=0), request("newcomer", slot=0)
    view = StepView([ending, *others], 0, 0, 1e6)
    assert policy.plan(view).lengths[0] < 6
    assert policy.plan(replace(view, decoding=[newcomer, *others])).lengths == [8] * 4
