"""Curves that cannot degenerate, and what becomes of those that fit badly; samples measured on an H100, 2026-11-26."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from faser_trtllm.core.cost_curve import CostSample, fit_curve, read_samples
from faser_trtllm.core.cost_table import CostTable, Fingerprint
from faser_trtllm.core.curve_error import MAX_ERROR, fit_curves, leave_one_out, mean_error
from faser_trtllm.errors import ConfigError

HERE = Fingerprint("Some GPU", "sm_90", 132, "abc")
PROFILE = Path(__file__).parent.parent / "data" / "h100_demo_profile.json"

# An 8B target: rows in all, requests, ms; with about 512 tokens of context.
STEPS = (
    *((1, 1, 7.088), (5, 1, 7.145), (2, 2, 7.092), (10, 2, 7.243), (4, 4, 7.073), (20, 4, 7.208), (8, 8, 7.318)),
    *((40, 8, 7.584), (16, 16, 7.488), (80, 16, 8.077), (32, 32, 7.742), (160, 32, 9.181), (64, 64, 9.112)),
    *((320, 64, 12.434), (128, 128, 11.519), (640, 128, 21.306)),
)
# The same with one row per request and 257 tokens.
DECODES = {1: 6.669, 2: 6.695, 4: 6.724, 8: 6.79, 16: 6.799, 32: 7.089, 64: 7.829, 128: 9.169, 256: 12.359}

# The first passes of a 0.3B draft model, as the day's bench measured them: rows, requests, context. A clock reading of
# 0.08 ms more at (4, 1) became 0.02 ms per row and token, so 116 ms for 29 rows.
FIRST_POINTS = ((1, 1, 257), (4, 1, 258), (4, 4, 257), (16, 16, 257), (64, 64, 257))
FIRST_MS = (1.00, 1.0796, 1.00, 1.01, 1.15)
STEP_MS = {1: 0.960, 2: 0.968, 4: 0.987, 8: 1.002, 16: 1.007, 32: 1.052, 64: 1.140, 128: 1.439, 256: 1.869}


def target_samples():
    steps = [CostSample("verify", n, r, 512 + round((n / r + 1) / 2), ms) for n, r, ms in STEPS]
    return steps + [CostSample("verify", n, n, 257, ms) for n, ms in DECODES.items()]


def draft_samples(first_ms=FIRST_MS):
    steps = [CostSample("draft_step", n, n, 260, ms) for n, ms in STEP_MS.items()]
    return steps + [CostSample("draft_rows", *at, ms) for at, ms in zip(FIRST_POINTS, first_ms, strict=True)]


def recorded():
    return json.loads(PROFILE.read_text())


def test_the_demo_pairs_own_samples_are_fitted():
    """The fit of that day was 423 % off the first passes that it was made from."""
    curves, errors = fit_curves(read_samples(recorded()["samples"]))
    assert set(curves) == {"verify@all", "draft_step@all", "draft_rows@all", "decode@all"}
    assert max(error.in_sample for error in errors.values()) < 0.02
    samples = [s for s in read_samples(recorded()["samples"]) if s.kind == "draft_rows"]
    assert leave_one_out(samples, slopes=True) < 0.05


def test_an_8b_targets_steps_and_decodes_are_one_curve():
    samples = target_samples()
    assert mean_error(fit_curve(samples), samples) < 0.01
    assert leave_one_out(samples, slopes=True) < 0.02


def test_a_clock_reading_does_not_become_a_slope():
    curves, errors = fit_curves([*target_samples(), *draft_samples()])
    assert curves["draft_rows@all"].at(29, 16, 200) == pytest.approx(1.03, rel=0.1)
    assert errors["draft_rows@all"].in_sample < 0.05
    table = CostTable.fit([*target_samples(), *draft_samples()], HERE)
    assert table.draft_first_ms_array(64, 1.5, 1024)[64] < 2.0


def test_slopes_that_do_not_help_are_left_away():
    """Nothing here depends on context, and two readings of one shape say otherwise."""
    flat = [CostSample("verify", n, n, c, 1.0) for n in (1, 2, 4, 8, 16, 32) for c in (64, 256)]
    shaken = [replace(s, ms=2.5) if (s.num_rows, s.context_len) in ((1, 256), (32, 256)) else s for s in flat]
    curves, errors = fit_curves(shaken)
    assert errors["verify@all"].refitted
    assert curves["verify@all"].at(8, 8, 4096) == curves["verify@all"].at(8, 8, 64)


def test_a_curve_that_does_not_fit_is_left_out_where_another_stands_for_it():
    shaken = [ms * factor for ms, factor in zip(FIRST_MS, (1.0, 9.0, 0.3, 5.0, 0.2), strict=True)]
    table = CostTable.fit([*target_samples(), *draft_samples(shaken)], HERE)
    assert not table.has("draft_rows")
    assert table.errors["draft_rows@all"].left_out
    assert table.errors["draft_rows@all"].in_sample > MAX_ERROR
    assert table.draft_rows_ms(8, 4, 260) == table.draft_step_ms(8, 260)
    (warning,) = table.warnings
    assert "draft_rows@all is off by" in warning
    assert "and is replaced by draft_step" in warning
    assert table.doubtful_kinds == ("draft_rows",)


@pytest.mark.parametrize("kind", ["verify", "draft_step"])
def test_a_curve_that_none_can_stand_for_is_kept_with_a_warning(kind):
    samples = [*target_samples(), *draft_samples()]
    held_out = [CostSample(kind, 8, 8, 260, 100.0)]
    table = CostTable.fit(samples, HERE, held_out=held_out)
    assert table.has(kind)
    assert f"{kind}@all is off by" in table.warnings[0]
    assert "faser profile" in table.warnings[0]
    assert not CostTable.fit(samples, HERE).warnings


def test_held_out_points_judge_a_curve_too():
    steps = [CostSample("decode", n, n, 257, ms) for n, ms in DECODES.items()]
    table = CostTable.fit([*target_samples(), *steps], HERE, held_out=[CostSample("decode", 3, 3, 257, 9.0)])
    assert table.errors["decode@all"].in_sample < 0.01
    assert table.errors["decode@all"].left_out
    assert table.decode_ms(3, 257) == table.verify_ms(3, 3, 257)


def test_what_no_first_pass_costs_is_refused_however_well_it_fits():
    dear = [1000.0 * ms for ms in FIRST_MS]
    table = CostTable.fit([*target_samples(), *draft_samples(dear)], HERE)
    assert not table.has("draft_rows")
    assert "draft_rows@all costs more than such passes do" in table.warnings[0]


def test_a_further_draft_of_a_block_does_not_stand_for_its_pass():
    """Which takes many times as long, and whose noise is no reason to take it for free."""
    noisy = [100.0 * ms * factor for ms, factor in zip(FIRST_MS, (1.0, 1.6, 0.6, 1.5, 0.7), strict=True)]
    drafts = [replace(s, kind="draft_block") if s.kind == "draft_rows" else s for s in draft_samples(noisy)]
    table = CostTable.fit([*target_samples(), *drafts], HERE)
    assert table.has("draft_block")
    assert not table.errors["draft_block@all"].left_out
    assert table.draft_rows_ms(16, 16, 260) > 10 * table.draft_step_ms(16, 260)
    assert table.draft_first_ms_array(16, 1.5, 260)[16] > 10 * table.draft_step_ms(16, 260)


def test_errors_and_warnings_outlive_a_file(tmp_path):
    table = CostTable.fit([*target_samples(), *draft_samples()], HERE, held_out=target_samples()[:1], quick=True)
    table.save(tmp_path / "profile.json")
    again = CostTable.load(tmp_path / "profile.json", HERE)
    assert again == table
    assert again.quick
    assert again.errors["verify@all"].held_out is not None
    assert again.errors["draft_step@all"].held_out is None


def test_a_file_without_errors_is_refused():
    """Version 0.1.0 wrote such files."""
    with pytest.raises(ConfigError, match=r"is incomplete or invalid at errors .*; run `faser profile` again"):
        CostTable.from_json(recorded())
