"""Costs follow what passes take; the machine's speed is not taken for the table's error."""

from dataclasses import replace

import numpy as np
import pytest

from faser_trtllm.policy.average import Average
from faser_trtllm.policy.base import PlanStats
from faser_trtllm.policy.costs import MeasuredCosts
from tests.policy.world import ROWS, cost_table, draft_ms, target_ms


def plan(n, drafts, *, steps=16, slowness=1.0, target=1.0, draft=1.0, host_ms=0.1):
    """Return the statistics of steps of n requests with so many drafts each, if the table has known errors."""
    rows = n * (1 + drafts)
    verify_ms = steps * target * slowness * target_ms(rows)
    one = draft_ms(n)
    draft_all = steps * draft * slowness * drafts * one if drafts else 0.0
    return PlanStats(
        steps,
        verify_ms + draft_all + steps * slowness * host_ms,
        draft_all,
        verify_ms,
        num_tokens=steps * n,
        num_requests=steps * n,
        num_rows=steps * rows,
        num_verified=steps * n * drafts,
        num_draft_calls=steps * (drafts > 0),
        num_draft_rows=steps * n * (drafts > 0),
        num_draft_steps=steps * drafts,
        num_drafted=steps * n * drafts,
    )


def test_an_average_forgets_what_is_older_than_its_memory():
    average = Average(100.0)
    for value in [1.0] * 50 + [3.0] * 50:
        average.add(value, 10.0)
    assert average.mean == pytest.approx(3.0, abs=0.02)
    first = Average(100.0)
    first.add(2.0, 1.0)
    assert first.mean == 2.0


def test_a_new_one_is_the_table():
    costs = MeasuredCosts(cost_table(), 4).step(4, 4, 64)
    assert costs.verify[0] == pytest.approx(target_ms(4), rel=0.05)
    assert costs.verify.shape == (17,)
    assert costs.draft_step[4] == pytest.approx(draft_ms(4), rel=0.05)
    assert costs.draft_first[0] == 0.0


def test_a_slow_machine_is_no_error_of_the_table():
    measured = MeasuredCosts(cost_table(), 4)
    for _ in range(5):
        measured.observe(plan(4, 2), 64)
    before = measured.step(4, 4, 64)
    for _ in range(20):
        usual_ms = measured.observe(plan(4, 2, slowness=1.6), 64)
    after = measured.step(4, 4, 64)
    assert measured.slowness == pytest.approx(1.6, rel=0.08)
    assert usual_ms == pytest.approx(plan(4, 2).ms, rel=0.08)
    assert after.verify[8] == pytest.approx(before.verify[8], rel=0.1)
    assert after.draft_step[4] == pytest.approx(before.draft_step[4], rel=0.1)


@pytest.mark.parametrize("pause_ms", [40.0, 10_000.0])
def test_a_pause_in_the_first_steps_of_a_kind_is_no_error_of_the_table(pause_ms):
    """Its passes take 32 ms in a plan; what is learnt then stays for 20 s of passes."""
    for part in ("verify_ms", "ms"):
        measured = MeasuredCosts(cost_table(), 4)
        seen = plan(4, 2)
        longer = {name: getattr(seen, name) + pause_ms for name in {part, "ms"}}
        measured.observe(replace(seen, **longer), 64)
        for _ in range(3):
            measured.observe(seen, 64)
        assert measured.step(4, 4, 64).verify[8] == pytest.approx(target_ms(12), rel=0.05)
        assert measured.step(4, 4, 64).host_ms == pytest.approx(0.1, abs=0.01)


def test_what_takes_longer_twice_is_an_error_of_the_table():
    measured = MeasuredCosts(cost_table(), 4)
    for _ in range(3):
        measured.observe(plan(4, 2, target=5.0, host_ms=2.0), 64)
    assert measured.step(4, 4, 64).verify[8] == pytest.approx(5.0 * target_ms(12), rel=0.05)
    assert measured.step(4, 4, 64).host_ms == pytest.approx(2.0, rel=0.05)


def test_a_wrong_curve_makes_no_machine_slow():
    """Not the pass nor steps without drafts, of which a plan has one kind only."""
    for drafts in (2, 0):
        measured = MeasuredCosts(cost_table(), 4)
        for _ in range(20):
            measured.observe(plan(4, drafts, target=5.0), 64)
        assert measured.slowness == pytest.approx(1.0, rel=0.06)
        measured.observe(plan(4, 2, target=5.0), 64)
        assert measured.step(4, 4, 64).draft_step[4] == pytest.approx(draft_ms(4), rel=0.1)


@pytest.mark.parametrize(("first", "further"), [(5.0, 1.0), (1.0, 5.0), (0.2, 1.0), (1.0, 0.2)])
def test_first_and_further_draft_steps_are_told_apart_by_calls_of_two_lengths(first, further):
    measured, table = MeasuredCosts(cost_table(), 4), cost_table()
    for number in range(2000):
        steps = 1 + 3 * (number % 2)
        seen = plan(4, steps)
        calls_ms = first * table.draft_rows_ms(4, 4, 64) + (steps - 1) * further * table.draft_step_ms(4, 64)
        measured.observe(replace(seen, draft_ms=16 * calls_ms, ms=seen.ms - seen.draft_ms + 16 * calls_ms), 64)
    costs = measured.step(4, 4, 64)
    assert costs.draft_step[4] == pytest.approx(further * table.draft_step_ms(4, 64), rel=0.1)
    assert costs.draft_first[4] == pytest.approx(first * table.draft_first_ms_array(4, 1.8, 64)[4], rel=0.1)


def test_the_rows_that_a_head_runs_again_are_part_of_its_first_step():
    """A row of a first step costs 0.001 ms in this table, so 400 rows cost what can be seen."""
    measured, table = MeasuredCosts(cost_table(), 4), cost_table()
    seen = plan(4, 2)
    calls_ms = table.draft_rows_ms(400, 4, 64) + table.draft_step_ms(4, 64)
    again = replace(seen, num_draft_rows=16 * 400, draft_ms=16 * calls_ms, ms=seen.ms - seen.draft_ms + 16 * calls_ms)
    for _ in range(100):
        measured.observe(again, 64)
    costs = measured.step(4, 4, 64)
    assert costs.draft_first[4] + costs.draft_step[4] == pytest.approx(calls_ms, rel=0.1)


def test_what_catching_up_takes_is_learnt_as_rows_and_ms():
    measured = MeasuredCosts(cost_table(), 4)
    before = measured.late_row_ms(4)
    for _ in range(5):
        seen = plan(4, 2)
        late = {"num_late_calls": 1, "num_late_rows": 407, "num_late_steps": 2, "num_late_drafted": 8}
        measured.observe(replace(seen, **late, late_ms=2 * draft_ms(4) + 400 * 0.01), 64)
    assert before < 0.002
    assert measured.late_row_ms(4) == pytest.approx(0.01, rel=0.1)


def test_a_step_without_drafts_costs_no_more_than_a_pass_next_to_drafting():
    """A wrong curve of it is of no use, and what never runs is never corrected."""
    table = cost_table()
    curves = dict(table.curves) | {"decode@all": replace(table.curves["verify@all"], ms=(20.0,) * len(ROWS))}
    measured = MeasuredCosts(replace(table, curves=curves), 4)
    assert measured.step(4, 4, 64).off_ms <= 1.01 * target_ms(4)


def test_drafting_that_is_slower_than_the_table_says_is_dearer_beside_the_pass():
    measured = MeasuredCosts(cost_table(), 4)
    for _ in range(60):
        measured.observe(plan(4, 2, draft=3.0), 64)
    costs = measured.step(4, 4, 64)
    ratio = costs.draft_step[4] / costs.verify[8]
    assert ratio == pytest.approx(3.0 * draft_ms(4) / target_ms(12), rel=0.1)


def test_steps_without_drafts_are_a_kind_of_their_own():
    """Plans take turns, so that the speed is known from either."""
    measured = MeasuredCosts(cost_table(), 4)
    for _ in range(60):
        measured.observe(plan(4, 2), 64)
        measured.observe(plan(4, 0, target=0.7), 64)
    costs = measured.step(4, 4, 64)
    ratio = costs.off_ms / (costs.verify[8] + costs.draft_step[4])
    assert ratio == pytest.approx((0.7 * target_ms(4) + 0.1) / (target_ms(12) + draft_ms(4)), rel=0.12)


def test_the_hosts_time_is_learnt_with_drafts_and_without():
    measured = MeasuredCosts(cost_table(), 4)
    for _ in range(10):
        measured.observe(plan(4, 2, host_ms=0.5), 64)
        measured.observe(plan(4, 0, host_ms=0.2), 64)
    costs = measured.step(4, 4, 64)
    assert costs.host_ms == pytest.approx(0.5, rel=0.1)
    assert costs.off_ms - costs.host_ms < target_ms(4)


def test_sizes_that_were_not_measured_go_with_the_nearest():
    measured = MeasuredCosts(cost_table(), 4)
    before = measured.step(32, 32, 64).draft_step / measured.step(32, 32, 64).verify[64]
    for _ in range(60):
        measured.observe(plan(4, 2, draft=3.0), 64)
    after = measured.step(32, 32, 64).draft_step / measured.step(32, 32, 64).verify[64]
    assert np.all(after[1:] > 2.0 * before[1:])


def test_a_step_without_drafts_takes_as_long_beside_prompts_as_alone():
    measured = MeasuredCosts(cost_table(), 4)
    alone = plan(4, 0)
    prompt_rows = 32
    with_prompts_ms = 16 * (target_ms(4 + prompt_rows) - target_ms(4))
    beside = replace(
        alone,
        ms=alone.ms + with_prompts_ms,
        verify_ms=alone.verify_ms + with_prompts_ms,
        num_context_rows=16 * prompt_rows,
    )
    assert measured.observe(alone, 64) == pytest.approx(alone.ms, rel=0.02)
    assert measured.observe(beside, 64) == pytest.approx(alone.ms, rel=0.02)


def test_steps_beside_prompts_are_averaged_by_their_shares():
    costs = MeasuredCosts(cost_table(), 4).step(4, 4, 64)
    mixed = costs.with_prompts({32: 0.5, 64: 0.25})
    expected = 0.25 * costs.rows[4:21] + 0.5 * costs.rows[36:53] + 0.25 * costs.rows[68:85]
    assert mixed == pytest.approx(expected)
    off_ms = costs.off_with_prompts({32: 0.5})
    assert off_ms == pytest.approx(0.5 * costs.off_ms + 0.5 * (float(costs.rows[36]) + costs.off_host_ms))
    assert costs.off_with_prompts({}) == costs.off_ms
