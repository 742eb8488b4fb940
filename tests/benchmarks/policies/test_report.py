"""Ratios of a policy bench report made by hand, and its JSON."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policies.best_rival import ratio_to_best
from benchmarks.policies.report import (
    Calibration,
    Case,
    PolicyBenchReport,
    Round,
    geometric_mean,
    percentile,
)

RATES = {
    "concurrency 1": {"off": 100, "fixed:2": 150, "fixed:4": 200, "schedule": 190, "price": 198},
    "concurrency 8": {"off": 400, "fixed:2": 380, "fixed:4": 300, "schedule": 395, "price": 360},
    "bursty": {"off": 300, "fixed:2": 250, "fixed:4": 240, "schedule": 330, "price": 350},
}


def one_round(rate: float) -> Round:
    return Round(rate, 1.0, 2.0, 3.0, math.nan, None, 1.2, 0.01, 0.95, 2.5, 0.2, {"serial": 0.75, "ping_pong": 0.25})


@pytest.fixture
def report() -> PolicyBenchReport:
    return PolicyBenchReport(
        environment={},
        options={},
        prompts={},
        cost_error={},
        cases=tuple(
            Case(4, workload, system, (one_round(rate), one_round(1.1 * rate), one_round(0.9 * rate)))
            for workload, rates in RATES.items()
            for system, rate in rates.items()
        ),
        calibrations=(),
        timelines=(),
        differences=(),
        absences=(),
        minutes=3.0,
    )


def test_best_fixed_is_of_the_workload(report: PolicyBenchReport) -> None:
    assert report.best_fixed(4, "concurrency 1").system == "fixed:4"
    assert report.best_fixed(4, "concurrency 8").system == "fixed:2"
    assert report.ratio_to_fixed(4, "bursty", "price") == pytest.approx(350 / 250)


def test_ratio_to_the_best_rival(report: PolicyBenchReport) -> None:
    assert report.ratio_to_best(4, "concurrency 1", "price") == pytest.approx(198 / 200)
    assert report.ratio_to_best(4, "concurrency 8", "price") == pytest.approx(360 / 400)
    assert report.ratio_to_best(4, "bursty", "missing") is None
    assert report.mean_ratio_to_best(4, "bursty", "missing") is None


def test_a_round_s_rival_is_picked_by_the_other_rounds() -> None:
    """Two rivals that are equally fast in the mean: the best of both in each round would be 1.1."""
    found = ratio_to_best([1.0, 1.0, 1.0, 1.0], [[1.1, 0.9, 1.1, 0.9], [0.9, 1.1, 0.9, 1.1]])
    assert found.mean > 1.0
    better = ratio_to_best([1.0, 1.0, 1.0], [[0.5, 0.5, 0.5], [1.2, 1.3, 1.4]])
    assert better.mean == pytest.approx((1.2 * 1.3 * 1.4) ** (-1 / 3))
    assert better.error == pytest.approx(statistics.stdev(map(math.log, (1.2, 1.3, 1.4))) / math.sqrt(3))
    with pytest.raises(ValueError, match="2 are needed"):
        ratio_to_best([1.0], [[1.0]])


def test_ablation_is_a_geometric_mean_over_workloads(report: PolicyBenchReport) -> None:
    ablation = report.ablation(4)
    assert list(ablation) == ["off", "best fixed", "schedule", "price"]
    assert ablation["off"] == pytest.approx(1.0)
    assert ablation["best fixed"] == pytest.approx(geometric_mean([2.0, 0.95, 250 / 300]))
    assert ablation["price"] == pytest.approx(geometric_mean([1.98, 0.9, 350 / 300]))


def test_json_is_strict(report: PolicyBenchReport, tmp_path: Path) -> None:
    report.write_json(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert data["exact"] is True
    assert data["cases"][0]["rounds"][0]["per_token_p99_ms"] is None
    assert data["ablation"]["4"]["off"] == pytest.approx(1.0)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.99, 4), (1.0, 4)])
def test_percentile(share: float, value: int) -> None:
    assert percentile([4, 2, 1, 3], share) == value


def test_percentile_of_nothing() -> None:
    assert math.isnan(percentile([], 0.5))


def test_the_calibration_error_weighs_bins_by_their_counts() -> None:
    count, predicted, passed = np.array([1.0, 0.0, 3.0]), np.array([0.1, 0.0, 2.7]), np.array([0.2, 0.0, 2.7])
    found = Calibration.of(1, "price", count, predicted, passed)
    assert found.ece == pytest.approx(0.025)
    assert (found.predicted[2], found.observed[0]) == pytest.approx((0.9, 0.2))
    assert math.isnan(found.observed[1])
