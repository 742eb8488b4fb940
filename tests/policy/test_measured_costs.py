"""What running steps teach of a cost table: scales by rows, the machine's mood, the time between steps."""

import random
from dataclasses import replace

import pytest

from faser_trtllm.core.cost_table import CostSample, CostTable, Fingerprint
from faser_trtllm.policy.base import Mode, StepOutcome
from faser_trtllm.policy.measured_costs import MeasuredCosts
from tests.policy.world import cost_table, request


def outcome(num_rows, verify_ms, *, num_drafted=0, draft_ms=0.0, draft_rows=0, now_s=0.0):
    pending = [num_drafted]
    return StepOutcome(
        [request("r", 8)], pending, pending, [0], [0], [0], num_drafted, num_rows, 0, draft_rows, 0,
        draft_ms, verify_ms, draft_ms + verify_ms, Mode.SERIAL, now_s,
    )  # fmt: skip


def teach(costs, num_rows, factor, steps=300):
    table = cost_table()
    for _ in range(steps):
        costs.observe(outcome(num_rows, factor * table.verify_ms(num_rows, 1, 64)), 64.0, 0.0)


def scales(costs):
    """Learnt over the table, for 1 to 9 rows of one request."""
    table = cost_table()
    return [ms / table.verify_ms(1 + i, 1, 64) for i, ms in enumerate(costs.costs(1, 1, 64.0).verify)]


def test_a_table_that_is_right_stays():
    costs = MeasuredCosts(cost_table(), 8)
    teach(costs, 4, 1.0)
    assert scales(costs) == pytest.approx([1.0] * 9, abs=0.03)
    assert costs.mood.factor == pytest.approx(1.0, abs=0.03)


def test_two_sizes_are_told_apart_and_what_is_learnt_fades_with_distance():
    """Passes of 8 rows take half as long again as the table says, those of 2 rows do not."""
    costs = MeasuredCosts(cost_table(), 8)
    for _ in range(40):
        teach(costs, 8, 1.5, steps=9)
        teach(costs, 2, 1.0, steps=9)
    found = scales(costs)
    assert found[7] / found[1] == pytest.approx(1.5, rel=0.06)
    assert 1.0 < found[0] / found[1] < 1.2  # beyond what was seen, back to the table
    assert found[1] < found[3] < found[7]


def test_a_machine_that_is_slower_for_a_while_is_no_news_of_the_table():
    costs = MeasuredCosts(cost_table(), 8)
    for mood in (1.0, 1.7, 1.0, 1.3, 1.7):
        for _ in range(10):
            teach(costs, 8, mood, steps=5)
            teach(costs, 2, mood, steps=5)
        assert scales(costs) == pytest.approx([1.0] * 9, abs=0.06)
        assert costs.mood.factor == pytest.approx(mood, rel=0.08)  # part of it may be a swing, which returns


def test_what_changes_while_one_kind_of_pass_goes_on_is_the_machine():
    costs = MeasuredCosts(cost_table(), 8)
    for _ in range(20):
        teach(costs, 8, 1.0, steps=5)
        teach(costs, 2, 1.0, steps=5)
    teach(costs, 8, 1.7, steps=400)
    found = scales(costs)
    assert found[7] / found[1] < 1.08
    assert found[7] * costs.mood.factor == pytest.approx(1.7, rel=0.05)


def test_now_and_then_a_slow_step_moves_little():
    costs = MeasuredCosts(cost_table(), 8)
    for _ in range(40):
        teach(costs, 8, 1.0, steps=5)
        teach(costs, 8, 30.0, steps=1)
        teach(costs, 2, 1.0, steps=15)
    found = scales(costs)
    assert found[7] / found[1] == pytest.approx(1.0, abs=0.2)


def test_steps_without_drafts_and_those_with_are_told_apart():
    table = cost_table()
    costs = MeasuredCosts(table, 8)
    for _ in range(60):
        teach(costs, 1, 0.5, steps=9)
        teach(costs, 4, 1.0, steps=9)
    found = costs.costs(1, 1, 64.0)
    off_ms = found.off_ms - table.overhead_ms
    expected = 0.5 * table.decode_ms(1, 64) / table.verify_ms(4, 1, 64)
    assert off_ms / found.verify[3] == pytest.approx(expected, rel=0.1)


def test_a_plan_without_drafts_tells_what_its_steps_took_in_the_mean():
    """Its steps take a third longer than the table says, beside those with drafts that keep to it."""
    costs, table = MeasuredCosts(cost_table(), 8), cost_table()
    off_ms, now_s = costs.costs(1, 1, 64.0).off_ms, 0.0
    for _ in range(80):
        teach(costs, 4, 1.0, steps=9)
        now_s += 0.1
        costs.observe_idle(1, 64.0, 50, 1.33 * table.decode_ms(1, 64.0) + table.overhead_ms, now_s)
    found = costs.costs(1, 1, 64.0)
    ratio = found.off_ms / found.verify[3]
    assert ratio == pytest.approx(1.33 * off_ms / table.verify_ms(4, 1, 64), rel=0.06)


def test_many_steps_say_more_than_one():
    moved = []
    for num_steps in (1, 50):
        costs, table = MeasuredCosts(cost_table(lambda rows: 0.1), 8), cost_table(lambda rows: 0.1)
        costs.observe_idle(1, 64.0, num_steps, 1.2 * table.decode_ms(1, 64.0), 0.1)
        moved.append(costs.mood.factor)
    assert 1.0 < moved[0] < moved[1]


def test_on_a_restless_machine_the_scales_hold_still():
    """Passes twice as long as the one before, or half; the table is right of all of them."""
    rng, table = random.Random(0), cost_table()
    worst = 0.0
    costs = MeasuredCosts(table, 8)
    for _ in range(1500):
        num_rows = rng.choice((2, 2, 2, 8))
        costs.observe(outcome(num_rows, rng.lognormvariate(0.0, 0.5) * table.verify_ms(num_rows, 1, 64)), 64.0, 0.0)
        found = scales(costs)
        worst = max(worst, abs(found[7] / found[1] - 1.0))
    assert worst < 0.25


def test_rows_of_a_draft_call_are_learnt_but_not_from_prompts():
    table = cost_table()
    costs = MeasuredCosts(table, 8)
    for draft_rows in [2] * 200 + [64] * 20:
        draft_ms = table.draft_rows_ms(draft_rows, 1, 64) + 2 * table.draft_step_ms(1, 64)
        verify_ms = table.verify_ms(4, 1, 64)
        costs.observe(outcome(4, verify_ms, num_drafted=3, draft_ms=draft_ms, draft_rows=draft_rows), 64.0, 0.0)
    found = costs.costs(1, 1, 64.0)
    assert found.draft_first[1] == pytest.approx(table.draft_rows_ms(2, 1, 64), rel=0.02)
    assert found.draft_step[1] == pytest.approx(table.draft_step_ms(1, 64), rel=0.02)


def test_what_the_draft_has_missed_has_a_price_of_its_own():
    costs, table = MeasuredCosts(cost_table(), 8), cost_table()
    a_row_ms = table.draft_rows_ms(64, 1, 64) / 64
    late = outcome(4, table.verify_ms(4, 1, 64), num_drafted=0, draft_ms=200 * 3.0 * a_row_ms, draft_rows=202)
    assert costs.late_row_ms == pytest.approx(a_row_ms)
    for _ in range(300):
        teach(costs, 4, 1.0, steps=1)
        costs.observe(late, 64.0, 0.0)
    assert costs.late_row_ms == pytest.approx(3.0 * a_row_ms, rel=0.07)
    assert costs.costs(1, 1, 64.0).draft_first[1] == pytest.approx(table.draft_rows_ms(2, 1, 64), rel=0.3)


def test_the_time_between_steps_is_that_step_s_own():
    """now_s is when a step was planned: it lasts until the next one is."""
    costs = MeasuredCosts(cost_table(), 8)
    for _ in range(200):
        costs.observe(outcome(1, 2.0, now_s=10.0), 64.0, 10.0 + 2.5e-3)
    assert costs.costs(1, 1, 64.0).off_ms * costs.mood.factor == pytest.approx(2.5, rel=0.03)


def test_the_host_s_time_between_the_engines_is_a_step_s_too():
    costs = MeasuredCosts(cost_table(), 8)
    for _ in range(200):
        found = replace(outcome(1, 2.0, now_s=10.0), step_ms=2.3)  # 0.3 ms to gather rows, and 0.2 behind the pass
        costs.observe(found, 64.0, 10.0 + 2.5e-3)
    assert costs.costs(1, 1, 64.0).off_ms * costs.mood.factor == pytest.approx(2.5, rel=0.03)


def test_what_a_step_costs_does_not_depend_on_the_contexts_asked_for_before():
    """Contexts of a bucket share their costs: those of its middle, with drafts and without."""
    samples = [
        CostSample(kind, n, n, context, 1.0 + 0.1 * n + 0.002 * n * context)
        for kind in ("verify", "decode", "draft_step", "draft_rows")
        for n in (1, 8, 32, 64)
        for context in (16, 64, 256)
    ]
    table = CostTable.fit(samples, Fingerprint("test", "test", 2, "test"))
    for context in range(60, 140, 3):
        used, fresh = MeasuredCosts(table, 1), MeasuredCosts(table, 1)
        for before in range(1, context):
            used.costs(32, 32, float(before))
        found, wanted = used.costs(32, 32, float(context)), fresh.costs(32, 32, float(context))
        assert found.off_ms == wanted.off_ms
        assert found.off_ms == pytest.approx(table.decode_ms(32, context), rel=0.08)
        assert found.verify[0] == pytest.approx(table.verify_ms(32, 32, context), rel=0.08)
        assert found.draft_first[32] == pytest.approx(table.draft_rows_ms(48, 32, context), rel=0.1)
