"""A plot of the host's time per step over requests, by system and by part."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.stats import summarize
from benchmarks.host.report import HostBenchReport


def write_plot(report: HostBenchReport, path: Path) -> bool:
    """Write a PNG; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    systems, sizes = report.systems, report.sizes
    figure = Figure(figsize=(4.6 * (1 + len(systems)), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    whole, *by_part = figure.subplots(1, 1 + len(systems))
    for system in systems:
        whole.plot(sizes, [1e-3 * report.us(system, n).median for n in sizes], marker="o", markersize=4, label=system)
    reference = [summarize([step.reference_us for step in report.select(systems[0], n)]).median for n in sizes]
    whole.plot(sizes, [1e-3 * us for us in reference], "k--", label="loop in C")
    whole.set(title="whole step", xlabel="requests", ylabel="ms", xscale="log", yscale="log")
    whole.legend(fontsize=7)
    for axis, system in zip(by_part, systems, strict=True):
        parts = [[report.part_us(system, n, part) / n for n in sizes] for part in report.parts]
        axis.stackplot(sizes, parts, labels=report.parts)
        axis.set(title=system, xlabel="requests", ylabel="us per request", xscale="log", ylim=(0, None))
        axis.legend(fontsize=6)
    figure.suptitle(f"{report.environment['cpu']}", fontsize=10)
    figure.savefig(path, dpi=120)
    return True
