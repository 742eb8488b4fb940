"""Plot a bench report: tokens per second over speculation settings, with peers as lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.stats import summarize
from benchmarks.peers.report import FASER, BenchReport, Form, fastest


def write_plot(report: BenchReport, path: Path) -> bool:
    """Write a PNG; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    batch_sizes = sorted({case.batch_size for case in report.cases})
    size = (4.2 * len(batch_sizes), 3.4 * len(report.forms))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(report.forms), len(batch_sizes), squeeze=False)
    for row, form in zip(axes, report.forms, strict=True):
        for axis, batch_size in zip(row, batch_sizes, strict=True):
            _draw(axis, report, form, batch_size)
    figure.suptitle(f"{report.environment['cpu']}, {report.options['num_threads']} threads, greedy, bf16")
    figure.savefig(path, dpi=150)
    return True


def _draw(axis: Any, report: BenchReport, form: Form, batch_size: int) -> None:
    ours = report.select(form.expand, batch_size, FASER)
    summaries = [summarize(case.tokens_per_s) for case in ours]
    medians = [summary.median for summary in summaries]
    ranges = [
        [summary.median - summary.low for summary in summaries],
        [summary.high - summary.median for summary in summaries],
    ]
    labels = [case.setting.removeprefix("fixed:") for case in ours]
    axis.errorbar(labels, medians, yerr=ranges, marker="o", capsize=3, label=FASER)
    peers = report.peers(form.expand, batch_size)
    for number, system in enumerate(dict.fromkeys(case.system for case in peers), 1):
        best = fastest(case for case in peers if case.system == system)
        assert best is not None
        rate = summarize(best.tokens_per_s).median
        axis.axhline(rate, color=f"C{number}", linestyle="--", label=f"{system} {best.setting}")
    axis.set_ylim(bottom=0)
    axis.set_title(f"{form.num_layers} layers, batch {batch_size}", fontsize=10)
    axis.set_xlabel("draft length")
    axis.set_ylabel("tokens per second")
    axis.legend(fontsize=7)
