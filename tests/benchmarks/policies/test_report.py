"""Ratios, goals and rendering of a policy bench report made by hand."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.policies.markdown import render_markdown
from benchmarks.policies.plot import write_plots
from benchmarks.policies.report import (
    Calibration,
    Case,
    PolicyBenchReport,
    Round,
    Timeline,
    geometric_mean,
    percentile,
)
from faser_trtllm.bench.stats import ratio_to_best

RATES = {
    "concurrency 1": {"off": 100, "fixed:2": 150, "fixed:4": 200, "schedule": 190, "price": 198},
    "concurrency 8": {"off": 400, "fixed:2": 380, "fixed:4": 300, "schedule": 395, "price": 360},
    "bursty": {"off": 300, "fixed:2": 250, "fixed:4": 240, "schedule": 330, "price": 350},
}


def one_round(rate: float) -> Round:
    return Round(rate, 1.0, 2.0, 3.0, math.nan, None, 1.2, 0.01, 0.95, 2.5, 0.2, {"serial": 0.75, "ping_pong": 0.25})


def make_report(differences: tuple[str, ...] = ()) -> PolicyBenchReport:
    environment = {
        "date": "today",
        "cpu": "a processor",
        "os": "an os",
        "git_commit": "0123456789abcdef",
        "git_dirty": False,
        "other_share": 0.01,
        "steal_share": 0.0,
        "command_line": "faser bench policies",
    }
    options = {
        "num_threads": 2,
        "prompt_len": 64,
        "min_tokens": 32,
        "max_tokens": 160,
        "sampled_share": 0.5,
        "temperature": 0.8,
    }
    return PolicyBenchReport(
        environment=environment,
        options=options,
        prompts={"source": "a library", "held_out": True},
        cost_error={"4": {"verify": 0.06, "draft_step": 0.05}},
        cases=tuple(
            Case(4, workload, system, (one_round(rate), one_round(1.1 * rate), one_round(0.9 * rate)))
            for workload, rates in RATES.items()
            for system, rate in rates.items()
        ),
        calibrations=(Calibration(4, "price", 0.02, (0.1, math.nan), (0.12, math.nan), (50.0, 0.0)),),
        timelines=(Timeline(4, "price", (0.5, 1.5), (1.0, 8.0), (6.0, 1.0), (100.0, 400.0)),),
        differences=differences,
        absences=("x4 gp_lcb: no reason",),
        minutes=3.0,
    )


def test_best_fixed_is_of_the_workload() -> None:
    report = make_report()
    assert report.best_fixed(4, "concurrency 1").system == "fixed:4"
    assert report.best_fixed(4, "concurrency 8").system == "fixed:2"
    assert report.ratio_to_fixed(4, "bursty", "price") == pytest.approx(350 / 250)


def test_ratio_to_the_best_rival() -> None:
    report = make_report()
    assert report.ratio_to_best(4, "concurrency 1", "price") == pytest.approx(198 / 200)
    assert report.ratio_to_best(4, "concurrency 8", "price") == pytest.approx(360 / 400)
    assert report.ratio_to_best(4, "bursty", "missing") is None


def test_a_round_s_rival_is_picked_by_the_other_rounds() -> None:
    """Two rivals that are equally fast in the mean: the best of both in each round would be 1.1."""
    found = ratio_to_best([1.0, 1.0, 1.0, 1.0], [[1.1, 0.9, 1.1, 0.9], [0.9, 1.1, 0.9, 1.1]])
    assert found.mean > 1.0
    better = ratio_to_best([1.0, 1.0, 1.0], [[0.5, 0.5, 0.5], [1.2, 1.3, 1.4]])
    assert better.mean == pytest.approx((1.2 * 1.3 * 1.4) ** (-1 / 3))
    assert better.error == pytest.approx(statistics.stdev(map(math.log, (1.2, 1.3, 1.4))) / math.sqrt(3))
    with pytest.raises(ValueError, match="2 are needed"):
        ratio_to_best([1.0], [[1.0]])


def test_the_mean_ratios_are_shown_with_their_errors() -> None:
    report = make_report()
    found = report.mean_ratio_to_best(4, "concurrency 1", "price")
    if found is None:
        pytest.fail("the report has two rounds")
    assert f"{found.mean:.3f} ± {found.error:.3f}" in render_markdown(report)
    assert report.mean_ratio_to_best(4, "concurrency 1", "missing") is None


def test_a_ratio_is_shown_with_its_range_over_the_rounds() -> None:
    report = make_report()
    rounds = {"off": (100.0, 200.0, 300.0), "price": (110.0, 180.0, 330.0)}
    cases = tuple(Case(4, "concurrency 1", name, tuple(map(one_round, rates))) for name, rates in rounds.items())
    assert "| price | 180 (1.10, 0.90 to 1.10) |" in render_markdown(replace(report, cases=cases))


def test_ablation_is_a_geometric_mean_over_workloads() -> None:
    ablation = make_report().ablation(4)
    assert list(ablation) == ["off", "best fixed", "schedule", "price"]
    assert ablation["off"] == pytest.approx(1.0)
    assert ablation["best fixed"] == pytest.approx(geometric_mean([2.0, 0.95, 250 / 300]))
    assert ablation["price"] == pytest.approx(geometric_mean([1.98, 0.9, 350 / 300]))


def test_markdown_says_which_goals_are_met() -> None:
    text = render_markdown(make_report())
    assert "all tokens of all systems" in text
    goals = next(line for line in text.splitlines() if line.startswith("| x4 | price |"))
    assert "0.900 (concurrency 8) NOT met" in goals
    assert "1.400 met" in goals
    assert "0.950 met" in goals
    assert "did not run: x4 gp_lcb" in text
    assert "ping_pong 25%, serial 75%" in text


def test_a_difference_is_shouted() -> None:
    text = render_markdown(make_report(("x4 bursty price: request 3, token 4",)))
    assert "NOT IDENTICAL: x4 bursty price: request 3, token 4" in text


def test_json_is_strict(tmp_path: Path) -> None:
    make_report().write_json(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert data["exact"] is True
    assert data["cases"][0]["rounds"][0]["per_token_p99_ms"] is None
    assert data["ablation"]["4"]["off"] == pytest.approx(1.0)


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert write_plots(make_report(), tmp_path)
    assert len(list(tmp_path.glob("policies_*.png"))) == 4


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4)])
def test_percentile(share: float, value: int) -> None:
    assert percentile([4, 2, 1, 3], share) == value


def test_percentile_of_nothing() -> None:
    assert math.isnan(percentile([], 0.5))
