"""The results as Markdown: milliseconds and ratios by size, and times by part."""

from __future__ import annotations

from benchmarks.common.markdown import table
from benchmarks.common.stats import summarize
from benchmarks.host.options import GPU, NULL
from benchmarks.host.report import HostBenchReport

_COUNTED = {
    NULL: "Engines compute nothing and their calls are not counted.",
    GPU: "Engines and rejection sampling are those of a GPU, on an *emulated device*, which computes nothing and whose "
    "memory is the host's. The host's part of their calls is counted: checks, batches, uploads, reads. Copies are "
    "torch's, on the CPU, instead of CUDA's, and nothing is launched, so the driver's time is left out. Work in the "
    "device's place is not counted.",
}
"""The part of the engines that is in the times."""


def render_markdown(report: HostBenchReport) -> str:
    environment = report.environment
    lines = [
        "# The host's time per step",
        "",
        f"`{environment['command_line']}`, {environment['cpu']}, commit {environment['git_commit']}; other processes "
        f"used {environment['other_share']:.0%} of the cores, other machines {environment['steal_share']:.0%}.",
        "",
        f"Times are CPU times. {_COUNTED[report.engines]} All requests decode, prompts are left out, and streams do "
        f"not overlap. Policies use modeled times ({report.costs}). Medians over rounds; ratios are to a loop in C "
        "with the same bookkeeping, measured in turn. On a shared machine only ratios are comparable.",
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
    idle = {size: [report.idle_us(system, size) for system in systems] for size in report.sizes}
    if any(us is not None for found in idle.values() for us in found):
        lines += ["", "## Milliseconds per step in which the GPU has nothing to do", ""]
        lines += ["The host's work after a launch is left out, since passes are assumed to be longer.", ""]
        rows = [
            [str(size), *("" if us is None else f"{1e-3 * us:.3f}" for us in found)] for size, found in idle.items()
        ]
        lines.append(table(["requests", *systems], rows))
    for system in systems:
        lines += ["", f"## {system}: microseconds by part", ""]
        rows = [
            [str(size), *(f"{report.part_us(system, size, part):.0f}" for part in report.parts)]
            for size in report.sizes
        ]
        lines.append(table(["requests", *report.parts], rows))
    return "\n".join(lines) + "\n"
