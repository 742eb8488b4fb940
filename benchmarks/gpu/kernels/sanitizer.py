"""Section "sanitizer": NVIDIA's compute-sanitizer on the kernels' tests on the GPU.

memcheck finds accesses outside of memory, racecheck races in shared memory. The references' torch kernels run under it,
too, so a finding names its kernel. A run without a summary has checked nothing and is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import faser_trtllm
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.skipped import Skipped

TOOLS = ("memcheck", "racecheck")
TESTS = "tests/ops/cuda"
TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
NUM_SHOWN = 20  # distinct findings of a tool
_SUMMARY = re.compile(r"=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?)")
_FINDING = re.compile(r"========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|    )(\S.*)")
_PLACE = re.compile(r"=========     (?:at|and) (.*)")
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b|\+0x[0-9a-f]+")
_TESTS_RUN = re.compile(r"\b(\d+) (passed|failed|errors?|skipped)\b")


@dataclass(frozen=True)
class Findings:
    """Results of a tool. num_errors: from its summary, None without one. findings: counts by text and place."""

    num_errors: int | None
    findings: Counter[str]


def run(bench: Bench) -> None:
    path = find_sanitizer()
    if path is None:
        raise Skipped("compute-sanitizer is not installed; it is a part of the CUDA toolkit")
    if not bench.machine.is_gpu:
        raise Skipped("a dry run has no kernels on a GPU")
    rows: list[tuple[object, ...]] = []
    for number, tool in enumerate(TOOLS):
        budget_s = bench.left_s / (len(TOOLS) - number)
        bench.record.attempt(tool, lambda tool=tool, s=budget_s: check(bench, path, tool, s, rows))  # type: ignore[misc]


def find_sanitizer() -> str | None:
    """Find compute-sanitizer on the PATH or in a toolkit."""
    folders = [os.environ.get("CUDA_HOME") or "", *TOOLKITS]
    places = os.pathsep.join([os.environ.get("PATH", ""), *(f"{folder}/bin" for folder in folders if folder)])
    return shutil.which("compute-sanitizer", path=places)


def check(bench: Bench, sanitizer: str, tool: str, budget_s: float, rows: list[tuple[object, ...]]) -> None:
    """Run the tests under one tool, and record its findings and the tests' output."""
    log = bench.file(f"{tool}.log").absolute()
    log.unlink(missing_ok=True)
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", TESTS]
    # torch makes calls that the driver may refuse, which are no findings.
    options = ["--tool", tool, "--target-processes", "application-only", "--report-api-errors", "no"]
    options += ["--print-limit", "1000", "--log-file", str(log)]
    # Without torch's cache, since an access after a tensor's end would hit cached memory unnoticed.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    root = Path(faser_trtllm.__file__).parents[1]
    try:
        done = subprocess.run(
            [sanitizer, *options, *tests], cwd=root, env=env, capture_output=True, text=True, timeout=max(1.0, budget_s)
        )
        said = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")
        bench.record.error(f"{tool} was stopped after {budget_s:.0f} s; run this section alone, with more --minutes")
    print(said)
    found = read_log(log.read_text(errors="replace") if log.exists() else "")
    counts = {word.rstrip("s"): int(number) for number, word in _TESTS_RUN.findall(said)}
    rows.append((tool, found.num_errors, *(counts.get(word, 0) for word in ("passed", "failed", "skipped"))))
    header = ("tool", "errors", "tests passed", "failed", "skipped")
    bench.record.table("compute-sanitizer over the kernels' tests", header, rows, "Warnings are not errors.")
    _judge(bench, tool, found, counts)


def _judge(bench: Bench, tool: str, found: Findings, counts: dict[str, int]) -> None:
    by_weight = sorted(found.findings.items(), key=lambda item: (item[0].startswith("Warning"), -item[1]))
    shown = [(count, words) for words, count in by_weight[:NUM_SHOWN]]
    if shown:
        bench.record.table(f"{tool}: findings", ("times", "what and where"), shown)
    if found.num_errors is None:
        bench.record.error(f"{tool} wrote no summary, so it has checked nothing; gpu.log has its output")
    elif found.num_errors:
        first = f"; first: {shown[0][1]}" if shown else ""
        bench.record.error(f"{tool} found {found.num_errors} error(s){first}")
    num_bad = counts.get("failed", 0) + counts.get("error", 0)
    if num_bad:
        bench.record.error(f"{num_bad} of the kernels' tests failed under {tool}; gpu.log has their output")
    elif not counts.get("passed"):
        bench.record.error(f"no test ran under {tool}, so it has seen no kernel; gpu.log has pytest's output")


def read_log(text: str) -> Findings:
    """Parse a log of memcheck or racecheck. Findings that differ only in addresses count as one."""
    summaries = [int(errors or races) for errors, races in _SUMMARY.findall(text)]
    findings: Counter[str] = Counter()
    lines = text.splitlines()
    for number, line in enumerate(lines):
        match = _FINDING.fullmatch(line.rstrip())
        if match is None:
            continue
        place = _PLACE.fullmatch(lines[number + 1].rstrip()) if number + 1 < len(lines) else None
        words = match[1] + (f" {place[0].split(maxsplit=1)[1]}" if place is not None else "")
        findings[_ADDRESS.sub("", words)] += 1
    return Findings(sum(summaries) if summaries else None, findings)
