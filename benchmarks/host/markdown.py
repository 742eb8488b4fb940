"""The results as Markdown: milliseconds and ratios by size, and where the time goes."""

from __future__ import annotations

from benchmarks.host.host_step import PARTS
from benchmarks.host.report import HostBenchReport
from faser_trtllm.bench.markdown import table
from faser_trtllm.bench.stats import summarize


def render_markdown(report: HostBenchReport) -> str:
    environment = report.environment
    lines = [
        "# What a step costs the host",
        "",
        f"`{environment['command_line']}`, {environment['cpu']}, commit {environment['git_commit']}; other processes "
        f"used {environment['other_share']:.0%} of the cores, other machines {environment['steal_share']:.0%}.",
        "",
        "Times are those that the process had a core. Engines compute nothing and their calls are not counted; all "
        "requests decode, prompts are apart, and lanes do not overlap. Policies decide by modelled times "
        f"({report.costs}). Medians over rounds; ratios are to a loop in C that does the same bookkeeping, measured in "
        "turn with them. On a machine that others use too, only ratios tell.",
        "",
        "## Milliseconds per step (ratio to the loop in C)",
        "",
    ]
    systems = report.systems
    rows = []
    for size in report.sizes:
        reference = summarize([step.reference_us for step in report.select(systems[0], size)]).median
        cells = [
            f"{1e-3 * report.us(system, size).median:.3f} ({report.ratio(system, size).median:.0f})"
            for system in systems
        ]
        rows.append([str(size), *cells, f"{1e-3 * reference:.4f}"])
    lines.append(table(["requests", *systems, "loop in C"], rows))
    for system in systems:
        lines += ["", f"## {system}: microseconds by part", ""]
        rows = [[str(size), *(f"{report.part_us(system, size, part):.0f}" for part in PARTS)] for size in report.sizes]
        lines.append(table(["requests", *PARTS], rows))
    return "\n".join(lines) + "\n"
