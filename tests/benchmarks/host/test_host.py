"""`faser bench host` writes what it says, for any batch and policy; times are not judged."""

import json

import pytest

from benchmarks.host.host_step import PARTS, measure_reference
from benchmarks.host.markdown import render_markdown
from benchmarks.host.options import GPU, NULL, HostBenchOptions
from benchmarks.host.report import HostBenchReport, HostStep
from benchmarks.host.runner import JSON_FILE, PLOT_FILE, TEXT_FILE, run_host_bench
from faser_trtllm.errors import InvalidArgumentError
from tests.support.effort import ONLY_ALL

SYSTEMS = ("off", "fixed:2", "price", "fixed:2/suffix", "price/suffix+model")
ENVIRONMENT = {"command_line": "faser bench host", "cpu": "a cpu", "git_commit": "abc"}


def step(system, num_requests, number, us):
    parts = dict.fromkeys(PARTS[NULL], 0.0) | {"commit": us}
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
        assert set(measured["parts_us"]) == set(PARTS[NULL])
        assert measured["us"] == pytest.approx(sum(measured["parts_us"].values()))
        assert min(measured["parts_us"].values()) >= 0.0 < measured["reference_us"]
        # What cannot be nothing in a step that brings tokens.
        assert min(measured["parts_us"][part] for part in ("schedule", "batch", "commit", "output")) > 0.0
    text = (tmp_path / TEXT_FILE).read_text()
    for heading in SYSTEMS:
        assert f"## {heading}: microseconds by part" in text
    assert (tmp_path / PLOT_FILE).stat().st_size > 0


def test_a_run_over_gpu_engines_has_their_parts_and_its_report_is_what_it_wrote(tmp_path):
    pytest.importorskip("torch")
    options = HostBenchOptions(
        tmp_path, num_requests=(1, 3), systems=("off", "fixed:2"), num_rounds=1, num_steps=3, engines=GPU
    )
    report = run_host_bench(options)
    for measured in report.steps:
        found = dict(measured.parts_us)
        assert tuple(found) == PARTS[GPU]
        assert found.pop("policy") >= 0.0  # its plan holds for more steps than these
        assert (found.pop("draft engine") > 0.0) == (measured.system == "fixed:2")
        assert min(found.values()) > 0.0
    data = json.loads((tmp_path / JSON_FILE).read_text())
    steps = [HostStep(**{name: value for name, value in step.items() if name != "us"}) for step in data["steps"]]
    assert HostBenchReport(data["environment"], data["costs"], steps, data["engines"]) == report
    assert [step["us"] for step in data["steps"]] == [sum(measured.parts_us.values()) for measured in report.steps]
    text = (tmp_path / TEXT_FILE).read_text()
    assert "*emulated device*" in text
    assert f"| requests | {' | '.join(PARTS[GPU])} |" in text


def test_the_report_takes_medians_over_rounds_and_ratios_to_the_reference():
    steps = [step("off", 32, number, us) for number, us in enumerate((100.0, 400.0, 200.0))]
    report = HostBenchReport(ENVIRONMENT | {"other_share": 0.0, "steal_share": 0.0}, "costs", steps)
    assert (report.us("off", 32).median, report.ratio("off", 32).median) == (200.0, 20.0)
    assert "| 32 | 0.200 (20) | 0.0100 |" in render_markdown(report)


def test_the_loop_in_c_checks_its_arguments():
    assert measure_reference(3, 4, 5) > 0.0
    with pytest.raises(InvalidArgumentError):
        measure_reference(0, 4, 5)
