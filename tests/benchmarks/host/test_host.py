"""`faser bench host` writes what it says, for any batch and policy; times are not judged."""

import json

import pytest

from benchmarks.host.host_step import PARTS, measure_reference
from benchmarks.host.markdown import render_markdown
from benchmarks.host.options import HostBenchOptions
from benchmarks.host.report import HostBenchReport, HostStep
from benchmarks.host.runner import JSON_FILE, PLOT_FILE, TEXT_FILE, run_host_bench
from faser_trtllm.errors import InvalidArgumentError
from tests.support.effort import ONLY_ALL

SYSTEMS = ("off", "fixed:2", "price", "fixed:2/suffix", "price/suffix+model")
ENVIRONMENT = {"command_line": "faser bench host", "cpu": "a cpu", "git_commit": "abc"}


def step(system, num_requests, number, us):
    parts = dict.fromkeys(PARTS, 0.0) | {"commit": us}
    return HostStep(system, num_requests, number, 10.0, parts)


@ONLY_ALL
def test_a_run_measures_every_system_and_size_in_every_round(tmp_path):
    pytest.importorskip("matplotlib")
    options = HostBenchOptions(tmp_path, num_requests=(1, 5), systems=SYSTEMS, num_rounds=2, num_steps=3)
    run_host_bench(options)
    data = json.loads((tmp_path / JSON_FILE).read_text())
    found = sorted((step["num_requests"], step["number"], step["system"]) for step in data["steps"])
    assert found == [(n, number, system) for n in (1, 5) for number in (0, 1) for system in sorted(SYSTEMS)]
    for measured in data["steps"]:
        assert set(measured["parts_us"]) == set(PARTS)
        assert measured["us"] == pytest.approx(sum(measured["parts_us"].values()))
        assert min(measured["parts_us"].values()) >= 0.0 < measured["reference_us"]
        # What cannot be nothing in a step that brings tokens.
        assert min(measured["parts_us"][part] for part in ("schedule", "batch", "commit", "output")) > 0.0
    text = (tmp_path / TEXT_FILE).read_text()
    for heading in SYSTEMS:
        assert f"## {heading}: microseconds by part" in text
    assert (tmp_path / PLOT_FILE).stat().st_size > 0


def test_the_report_takes_medians_over_rounds_and_ratios_to_the_reference():
    steps = [step("off", 32, number, us) for number, us in enumerate((100.0, 400.0, 200.0))]
    report = HostBenchReport(ENVIRONMENT | {"other_share": 0.0, "steal_share": 0.0}, "costs", steps)
    assert (report.us("off", 32).median, report.ratio("off", 32).median) == (200.0, 20.0)
    assert "| 32 | 0.200 (20) | 0.0100 |" in render_markdown(report)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_requests": (0,)}, "requests"),
        ({"num_rounds": 0}, "rounds"),
        ({"num_steps": 0}, "steps"),
        ({"systems": ("price/oracle",)}, "policies"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(tmp_path, change, field):
    with pytest.raises(InvalidArgumentError, match=rf"^{field} (is|has) .* must be"):
        run_host_bench(HostBenchOptions(tmp_path, **change))


def test_the_loop_in_c_checks_its_arguments():
    assert measure_reference(3, 4, 5) > 0.0
    with pytest.raises(InvalidArgumentError):
        measure_reference(0, 4, 5)
