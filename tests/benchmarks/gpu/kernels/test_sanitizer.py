"""The section "sanitizer", with a stand-in that writes what compute-sanitizer's manual shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.kernels import sanitizer
from benchmarks.gpu.machine import DryMachine
from benchmarks.gpu.options import GpuBenchOptions
from benchmarks.gpu.report.record import Record
from benchmarks.gpu.section_process import run_entry
from tests.benchmarks.gpu.harness import ENTRIES

CLEAN = {
    "memcheck": "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",
    "racecheck": "=========\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
}
OUTSIDE = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at append_kv(float *, int)+0x160
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f57fd400003 is misaligned
=========
========= Invalid __global__ write of size 4 bytes
=========     at append_kv(float *, int)+0x190
=========     by thread (1,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
RACES = """========= COMPUTE-SANITIZER
========= Warning: Race reported between Read access at accept(int)+0x260
=========     and Write access at accept(int)+0x200 [294 hazards]
=========
========= Error: Race reported between Write access at accept(int)+0xa70
=========     and Read access at accept(int)+0x970 [16 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
PASSED = "12 passed, 3 skipped in 4.56s"


class GpuLike(DryMachine):
    is_gpu = True


@pytest.fixture
def run(tmp_path: Path, options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the section with a tool that writes these logs, by tool, and says what pytest would."""

    def run_section(logs: dict[str, str], said: str = PASSED) -> dict[str, Any]:
        tool = tmp_path / "compute-sanitizer"
        for name, text in logs.items():
            (tmp_path / f"{name}.text").write_text(text)
        tool.write_text(
            "#!/bin/sh\n"
            f'[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] && [ -d {sanitizer.TESTS} ] || exit 9\n'
            'while [ "$1" != -m ]; do case $1 in --tool) tool=$2;; --log-file) log=$2;; esac; shift; done\n'
            f'[ "$3 $4" = "-m gpu" ] || exit 9\n[ -e {tmp_path}/$tool.text ] && cp {tmp_path}/$tool.text "$log"\n'
            f"echo '{said}'\n"
        )
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        record = Record()
        run_entry(ENTRIES["sanitizer"], options, record, 60.0, GpuLike())
        return record.data

    return run_section


def test_a_clean_run_is_ok(run: Any) -> None:
    found = run(CLEAN)
    assert found["status"] == "ok", found["errors"]
    (table,) = found["tables"]
    assert table["rows"] == [["memcheck", "0", "12", "0", "3"], ["racecheck", "0", "12", "0", "3"]]


def test_findings_are_counted_by_what_and_where(run: Any) -> None:
    found = run({"memcheck": OUTSIDE, "racecheck": RACES})
    assert found["errors"] == [
        "memcheck found 2 error(s); first: Invalid __global__ write of size 4 bytes at append_kv(float *, int)",
        "racecheck found 1 error(s); first: Error: Race reported between Write access at accept(int) "
        "and Read access at accept(int) [16 hazards]",
    ]
    findings = {table["title"]: table["rows"] for table in found["tables"][1:]}
    assert findings["memcheck: findings"][0][0] == "2"
    assert len(findings["racecheck: findings"]) == 2


@pytest.mark.parametrize(
    ("logs", "said", "error"),
    [
        ({"memcheck": CLEAN["memcheck"]}, PASSED, "racecheck wrote no summary, so it has checked nothing"),
        (CLEAN, "4 failed, 8 passed in 9s", "4 of the kernels' tests failed under memcheck"),
        (CLEAN, "12 skipped in 1s", "no test ran under memcheck, so it has seen no kernel"),
    ],
)
def test_a_run_that_checks_nothing_is_an_error(run: Any, logs: dict[str, str], said: str, error: str) -> None:
    assert error in run(logs, said)["errors"][0]


def test_without_the_tool_or_a_gpu_it_is_skipped(options: GpuBenchOptions, run: Any, monkeypatch: Any) -> None:
    record = Record()
    monkeypatch.setattr(sanitizer, "TOOLKITS", ())
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: None)
    run_entry(ENTRIES["sanitizer"], options, record, 60.0, GpuLike())
    assert record.data["status"].startswith("skipped: compute-sanitizer is not installed")
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: "/bin/true")
    run_entry(ENTRIES["sanitizer"], options, record, 60.0, DryMachine())
    assert record.data["status"] == "skipped: a dry run has no kernels on a GPU"
