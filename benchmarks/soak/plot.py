"""Plot a soak: memory, descriptors, threads and throughput over time, with the kills."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.soak.growth import MIB
from benchmarks.soak.report import SoakReport

_RATE_WINDOW_S = 5.0


def write_plot(report: SoakReport, path: Path) -> bool:
    """Write a PNG; False if matplotlib is not installed or there is nothing to show."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if len(report.samples) < 2:
        return False
    figure = Figure(figsize=(9.0, 10.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(4, 1, sharex=True)
    roles = dict.fromkeys(role for sample in report.samples for role in sample.processes)
    for role in roles:
        points = [(_seconds(report, s.at_s), s.processes[role]) for s in report.samples if role in s.processes]
        seconds = [at for at, _ in points]
        for axis, values in (
            (axes[0], [p.rss_bytes / MIB for _, p in points]),
            (axes[1], [p.num_fds for _, p in points]),
            (axes[2], [p.num_threads for _, p in points]),
        ):
            axis.plot(seconds, values, linewidth=1, label=role)
    axes[3].plot(*_throughput(report), linewidth=1)
    for axis, label in zip(axes, ("resident MiB", "descriptors", "threads", "tokens per second"), strict=True):
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        for kill in report.ledger.kills:
            axis.axvline(_seconds(report, kill.killed_s), color="0.7", linewidth=0.8, linestyle=":")
    axes[0].legend(fontsize=7, ncols=4)
    axes[0].set_title(f"{report.environment['cpu']}; dotted: the engine child is killed", fontsize=10)
    axes[3].set_xlabel("seconds of load")
    figure.savefig(path, dpi=120)
    return True


def _seconds(report: SoakReport, at_s: float) -> float:
    return at_s - report.start_s


def _throughput(report: SoakReport) -> tuple[list[float], list[Any]]:
    """Return tokens per second of finished requests, in windows of about _RATE_WINDOW_S."""
    marks = [report.samples[0]]
    for sample in report.samples:
        if sample.at_s - marks[-1].at_s >= _RATE_WINDOW_S:
            marks.append(sample)
    pairs = list(pairwise(marks))
    rates = [(b.num_tokens - a.num_tokens) / (b.at_s - a.at_s) for a, b in pairs]
    return [_seconds(report, b.at_s) for _, b in pairs], rates
