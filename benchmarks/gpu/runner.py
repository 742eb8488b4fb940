"""`faser bench gpu`: run the sections in sequence, each in its own process, within the time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.environment import describe_environment, portable
from benchmarks.gpu.bench import RESULT_FILE
from benchmarks.gpu.options import GpuBenchOptions
from benchmarks.gpu.report.failures import EARLIER, SKIPPED
from benchmarks.gpu.report.markdown import render_markdown
from benchmarks.gpu.report.plot import write_plots
from benchmarks.gpu.sections import SECTIONS, Section, chosen, fitting

FORMAT_VERSION = 1
MIN_BUDGET_S = 10.0  # minimum to import torch and measure anything
LOG_TAIL_BYTES = 20_000
SECTION_PROCESS: tuple[str, ...] = (sys.executable, "-m", "benchmarks.gpu.section_process")
Progress = Callable[[str], None]


def run_gpu_bench(
    options: GpuBenchOptions, progress: Progress | None = None, sections: Sequence[Section] = SECTIONS
) -> dict[str, Any]:
    """Measure, and write gpu.json, gpu.md, gpu.log and (with matplotlib) gpu.png into options.output_dir.

    The files are rewritten after every section. A section that fails, crashes or times out is reported with its partial
    results, and the next one runs. Unless sections are named, those that do not fit the minutes are left out. Sections
    of an earlier run into the same folder are kept and marked. Returns the contents of gpu.json.
    """
    options.validate()
    plan = named = chosen(options.sections, sections)
    if not options.sections and not options.dry_run:  # on a CPU times differ
        plan = fitting(named, 60.0 * options.minutes)
    say = progress or (lambda line: None)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    report: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "environment": describe_environment(options.command_line),
        "options": _options_dict(options),
        "sections": _earlier_sections(options),
        "seconds": 0.0,
    }
    log_path = options.output_dir / "gpu.log"
    log_path.write_text("")
    for number, section in enumerate(plan, 1):
        left_s = 60.0 * options.minutes - (time.monotonic() - start_s)
        if left_s < MIN_BUDGET_S:
            over = f"not run: the {options.minutes:g} minutes were over"
            # Earlier results are worth more than an empty section.
            found: dict[str, Any] = report["sections"].get(section.name, {"status": over})
        else:
            say(f"{section.name} ({number} of {len(plan)}): {section.what}, {left_s:.0f} s left")
            # Reserve the time of later sections; this one may use the rest.
            spare_s = left_s - sum(later.typical_s for later in plan[number:])
            found, log = run_section(section, options, min(section.limit_s, left_s, max(section.typical_s, spare_s)))
            with log_path.open("a") as file:
                file.write(f"===== {section.name}\n{log}\n")
        report["sections"][section.name] = {"what": section.what} | found
        report["seconds"] = round(time.monotonic() - start_s, 1)
        write_report(report, options.output_dir)
        say(f"{section.name}: {found['status']}")
    for section in (section for section in named if section not in plan):
        why = f"{SKIPPED}{options.minutes:g} minutes have no room for its {section.typical_s:.0f} s"
        report["sections"].setdefault(section.name, {"what": section.what, "status": why})
    write_report(report, options.output_dir)
    return report


def run_section(section: Section, options: GpuBenchOptions, budget_s: float) -> tuple[dict[str, Any], str]:
    """Run one section; return its record and the end of its output. Never raises for errors of the section."""
    with tempfile.TemporaryDirectory(prefix="faser-gpu-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        job = json.dumps({"entry": section.entry, "budget_s": budget_s, "options": json.loads(options.to_json())})
        command = [*SECTION_PROCESS, str(result)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True, start_new_session=True
            )
            try:
                process.communicate(job, timeout=budget_s)
                ending = _ending(process.returncode)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the section's own group: it may have children
                process.wait()
                ending = f"stopped after {budget_s:.0f} s, with what it had"
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        try:
            found: dict[str, Any] = json.loads(result.read_text())
        except (OSError, ValueError):
            found = {"values": {}, "tables": [], "plots": [], "notes": [], "errors": []}
        if found.get("status") in (None, "running"):
            found["status"] = ending
        return found, log.read_text(errors="replace")[-LOG_TAIL_BYTES:]


def write_report(report: dict[str, Any], output_dir: Path) -> None:
    path = output_dir / RESULT_FILE
    staged = path.with_suffix(".tmp")
    staged.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(staged, path)
    (output_dir / "gpu.md").write_text(render_markdown(report))
    write_plots(report, output_dir / "gpu.png")


def _earlier_sections(options: GpuBenchOptions) -> dict[str, Any]:
    """Return the results in output_dir of a run of the same kind, so that a part can be measured again."""
    try:
        report = json.loads((options.output_dir / RESULT_FILE).read_text())
        if report["version"] != FORMAT_VERSION or report["options"]["dry_run"] != options.dry_run:
            return {}
        found: dict[str, Any] = report["sections"]
        for data in found.values():
            data["status"] = EARLIER + data["status"].removeprefix(EARLIER)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return found


def _ending(code: int) -> str:
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}, with what it had"
    return f"ended with exit code {code}, with what it had"


def _options_dict(options: GpuBenchOptions) -> dict[str, Any]:
    """Return options for JSON, without machine-specific folders."""
    values = json.loads(options.to_json())
    del values["command_line"]
    return {name: portable(value) if name.endswith("_dir") else value for name, value in values.items()}
