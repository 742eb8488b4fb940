"""The GPU suite's runner: sections in processes of their own, partial results, whatever they do."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import runner
from benchmarks.gpu.bench import Bench, Ceilings
from benchmarks.gpu.models.enlarge import SHAPES
from benchmarks.gpu.options import DRAFT_OF, FORMS, GpuBenchOptions
from benchmarks.gpu.report.failures import failures
from benchmarks.gpu.report.markdown import render_markdown
from benchmarks.gpu.report.record import Record
from benchmarks.gpu.runner import run_gpu_bench
from benchmarks.gpu.section_process import run_entry
from benchmarks.gpu.sections import SECTIONS, Section, fitting
from tests.support.effort import pick

pytestmark = pytest.mark.slow

NO_MACHINE = (sys.executable, "-m", "tests.benchmarks.gpu.no_machine")  # runs without a GPU what is no dry run, too


def options(output_dir: Path, **values: Any) -> GpuBenchOptions:
    return GpuBenchOptions(Path("target"), Path("draft"), output_dir, **({"dry_run": True} | values))


def section(name: str, limit_s: float = 60.0) -> Section:
    return Section(name, f"the section {name}", f"tests.benchmarks.gpu.gpu_sections:{name}", limit_s)


@pytest.fixture(scope="module", autouse=True)
def section_process() -> Iterator[None]:
    """That of a section here; the command's tests have the suite's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "SECTION_PROCESS", pick(NO_MACHINE, runner.SECTION_PROCESS))
        yield


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A finished run of one section, and the seconds that it took."""
    output, started_s = tmp_path_factory.mktemp("gpu"), time.monotonic()
    run_gpu_bench(options(output), sections=[section("fine")])
    return output, time.monotonic() - started_s


@pytest.fixture(scope="module")
def limit_s(earlier: tuple[Path, float]) -> int:
    """Time enough for a section to start on this machine, as busy as it is."""
    return math.ceil(1 + 2 * earlier[1])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, limit_s: int) -> tuple[dict[str, Any], Path]:
    """A run over sections that do everything that can go wrong."""
    output = tmp_path_factory.mktemp("gpu")
    names = ("fine", "one_measurement_fails", "raises", "crashes")
    names += pick((), ("refuses", "skips", "reads_what_was_before"))
    plan = [*map(section, names), section("hangs", limit_s)]
    return run_gpu_bench(options(output), sections=plan), output


def test_every_section_is_reported_with_what_it_had(report: tuple[dict[str, Any], Path], limit_s: int) -> None:
    found = report[0]["sections"]
    status = {name: data["status"] for name, data in found.items()}
    expected = {
        "fine": "ok",
        "one_measurement_fails": "1 measurement(s) failed",
        "raises": "failed: RuntimeError: broken",
        "refuses": "not run: a thing is missing; install it",
        "skips": "skipped: a tool is not installed",
        "crashes": "crashed with SIGSEGV, with what it had",
        "reads_what_was_before": "ok",
        "hangs": f"stopped after {limit_s} s, with what it had",
    }
    assert status == {name: expected[name] for name in status}
    assert found["one_measurement_fails"]["errors"] == ["division: ZeroDivisionError: division by zero"]
    assert found["one_measurement_fails"]["values"] == {"after": 1}
    for name in ("raises", "crashes", "hangs"):
        assert found[name]["values"] == {"before": 1}
    if "reads_what_was_before" in found:
        assert found["reads_what_was_before"]["values"] == {"seen": "a device"}


def test_files_hold_the_report(report: tuple[dict[str, Any], Path]) -> None:
    found, output = report
    assert json.loads((output / "gpu.json").read_text()) == found
    text = (output / "gpu.md").read_text()
    assert text == render_markdown(found)
    failed = pick("4 of 5", "5 of 8")
    assert text.startswith(
        f"# faser bench gpu\n\nFailed: {failed} sections\n\n1. `one_measurement_fails`: 1 measurement"
    )
    assert "Dry run" in text
    assert "| - | x\\|y |" in text
    assert "A note." in text
    assert "- division: ZeroDivisionError: division by zero" in text
    assert (output / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert "RuntimeError: broken" in (output / "gpu.log").read_text()
    assert str(output) not in (output / "gpu.json").read_text()


def test_sections_of_an_earlier_run_stay_and_say_so(earlier: tuple[Path, float]) -> None:
    output, _ = earlier
    found = run_gpu_bench(options(output), sections=[section("reads_what_was_before")])["sections"]
    assert found["fine"]["status"] == "earlier run: ok"
    assert found["reads_what_was_before"]["values"] == {"seen": "a device"}
    again = run_gpu_bench(options(output), sections=[section("raises")])["sections"]
    assert again["fine"]["status"] == "earlier run: ok"


def test_sections_without_time_are_not_run(tmp_path: Path) -> None:
    found = run_gpu_bench(options(tmp_path, minutes=0.01), sections=[section("fine")])
    assert found["sections"]["fine"]["status"] == "not run: the 0.01 minutes were over"


def test_the_default_time_is_enough_for_every_section(tmp_path: Path) -> None:
    assert fitting(SECTIONS, 60 * options(tmp_path).minutes) == list(SECTIONS)
    assert all(0 < s.typical_s <= s.limit_s for s in SECTIONS)


def test_short_runs_have_what_is_worth_most() -> None:
    """benchmarks/gpu/README.md lists the same."""
    short, middle = ({s.name for s in fitting(SECTIONS, 60 * minutes)} for minutes in (5, 12))
    assert short == {
        *("environment", "cuda", "exactness", "steps", "row_counts", "breakdown", "costs", "policies", "host_profile"),
        "claims",
    }
    assert middle == {*short, "timeline", "gemms", "kernels", "fp8", "partitions", "other_policies", "peers"}


def test_what_does_not_fit_the_minutes_is_left_out_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SECTION_PROCESS", NO_MACHINE)

    def lasting(name: str, typical_s: float) -> Section:
        return dataclasses.replace(section(name), typical_s=typical_s)

    plan = [lasting("fine", 300.0), lasting("raises", 310.0), lasting("one_measurement_fails", 250.0)]
    given = options(tmp_path, dry_run=False, minutes=10.0)
    found = run_gpu_bench(given, sections=plan)
    status = {name: data["status"] for name, data in found["sections"].items()}
    assert status == {
        "fine": "ok",
        "one_measurement_fails": "1 measurement(s) failed",
        "raises": "skipped: 10 minutes have no room for its 310 s",
    }
    assert [name for name, _ in failures(found)] == ["one_measurement_fails"]
    assert "`raises`, 10 minutes have no room" in (tmp_path / "gpu.md").read_text()
    named = run_gpu_bench(dataclasses.replace(given, sections=("raises",)), sections=plan)
    assert named["sections"]["raises"]["status"] == "failed: RuntimeError: broken", "it is run where it is named"


def test_time_that_later_sections_need_is_kept_for_them(tmp_path: Path) -> None:
    def spending(name: str, typical_s: float) -> Section:
        entry = "tests.benchmarks.gpu.gpu_sections:tells_its_time"
        return Section(name, "tells", entry, limit_s=500.0, typical_s=typical_s)

    plan = [spending("first", 100.0), spending("second", 300.0), spending("third", 50.0)]
    found = run_gpu_bench(options(tmp_path, minutes=10.0), sections=plan)["sections"]
    left_s = {name: data["values"]["left_s"] / 0.9 for name, data in found.items()}
    assert 100.0 < left_s["first"] <= 600.0 - 350.0
    assert left_s["first"] < left_s["second"] <= 500.0


def test_forms_without_time_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: tuple[dict[str, Any], Path]
) -> None:
    record, left_s = Record(), iter([70.0, 59.0, 80.0])
    monkeypatch.setattr(Bench, "left_s", property(lambda bench: next(left_s)))
    bench = Bench(options(tmp_path, dry_run=False), None, record)  # type: ignore[arg-type]
    assert list(bench.forms(60.0)) == [FORMS[0], FORMS[1], FORMS[3]]
    assert record.data["notes"] == [f"{FORMS[2]}: the time was over"]
    found = {"sections": {"steps": {"what": "w", "status": "ok"} | record.data}}
    assert "Not measured:\n\n- 1B: the time was over" in render_markdown(report[0] | found)


def test_every_form_and_its_draft_have_a_shape() -> None:
    assert set(FORMS) == set(DRAFT_OF)
    assert set(DRAFT_OF) | set(DRAFT_OF.values()) <= set(SHAPES)
    for form, draft in DRAFT_OF.items():
        assert SHAPES[form].vocab_size == SHAPES[draft].vocab_size


def test_ceilings_are_the_slower_of_bytes_and_arithmetic() -> None:
    ceilings = Ceilings(4e12, 800e12, measured=True)
    assert ceilings.floor_ms(4e9) == 1.0
    assert ceilings.floor_ms(4e9, 1.6e12) == 2.0


def test_without_a_gpu_sections_say_what_is_missing(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    record = Record()
    run_entry(SECTIONS[0].entry, dataclasses.replace(options(tmp_path), dry_run=False), record, 10.0)
    assert record.data["status"].endswith("--dry_run shows without a GPU that the suite runs")


def test_the_command_writes_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "faser_trtllm.cli", "bench", "gpu", "--output_dir", str(tmp_path), "--dry_run"]
    done = subprocess.run([*command, "--sections", "environment"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "| environment |" in done.stdout
    assert done.stdout.startswith("# faser bench gpu\n\nNothing failed.\n")
    bad = subprocess.run([*command, "--sections", "nothing"], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 2
    assert bad.stderr.startswith("faser: section nothing is unknown")


def test_the_exit_code_says_that_a_section_failed(tmp_path: Path) -> None:
    """Here for want of time."""
    given = ["--output_dir", str(tmp_path), "--sections", "environment", "--minutes", "0.01"]
    command = [sys.executable, "-m", "benchmarks.gpu", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "1. `environment`: not run: the 0.01 minutes were over" in done.stdout
