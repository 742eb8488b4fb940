"""Plots of a policy bench report: throughput over concurrency, the bursty run, the ablation, reliability."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.stats import summarize
from benchmarks.policies.options import OFF
from benchmarks.policies.report import BURSTY, PolicyBenchReport

SHOWN_IN_TIME = ("schedule", "gp_lcb", "price", "price+pruning+overlap")


def write_plots(report: PolicyBenchReport, folder: Path) -> bool:
    """Write PNGs; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    forms = report.forms()
    for name, draw, height, rows in (
        ("policies_throughput", _throughput, 4.0, 1),
        ("policies_bursty", _bursty, 5.5, 2),
        ("policies_ablation", _ablation, 3.6, 1),
        ("policies_reliability", _reliability, 3.8, 1),
    ):
        figure = Figure(figsize=(5.6 * len(forms), height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, len(forms), squeeze=False)
        for column, expand in enumerate(forms):
            draw([axes[row][column] for row in range(rows)], report, expand)
        figure.suptitle(f"{report.environment['cpu']}, {report.options['num_threads']} threads", fontsize=10)
        figure.savefig(folder / f"{name}.png", dpi=130)
    return True


def _throughput(axes: list[Any], report: PolicyBenchReport, expand: int) -> None:
    axis = axes[0]
    closed = [w for w in report.workloads(expand) if w != BURSTY]
    lines: dict[str, dict[int, float]] = {}
    for workload in closed:
        concurrency = int(workload.split()[-1])
        cases = report.select(expand, workload)
        best = report.best_fixed(expand, workload)
        shown = {name: case for name, case in cases.items() if not name.startswith("fixed:")}
        if best is not None:
            shown["best fixed"] = best
        for name, case in shown.items():
            lines.setdefault(name, {})[concurrency] = summarize(case.rates()).median
    for name, points in lines.items():
        axis.plot(list(points), list(points.values()), marker="o", markersize=4, label=name)
    axis.set_xscale("log", base=2)
    axis.set(title=f"x{expand}", xlabel="requests in flight", ylabel="output tokens per second", ylim=(0, None))
    axis.legend(fontsize=7)


def _bursty(axes: list[Any], report: PolicyBenchReport, expand: int) -> None:
    best = report.best_fixed(expand, BURSTY)
    names = [OFF, *([best.system] if best else []), *SHOWN_IN_TIME]
    for timeline in (t for t in report.timelines if t.expand == expand and t.system in names):
        axes[0].plot(timeline.seconds, timeline.num_requests, linewidth=1, label=timeline.system)
        axes[1].plot(timeline.seconds, timeline.draft_len, linewidth=1, label=timeline.system)
    axes[0].set(title=f"x{expand}, bursty", ylabel="requests in flight")
    axes[1].set(xlabel="seconds, idle time left out", ylabel="drafts per request")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(fontsize=7)


def _ablation(axes: list[Any], report: PolicyBenchReport, expand: int) -> None:
    ratios = report.ablation(expand)
    bars = axes[0].barh(list(ratios), list(ratios.values()), color=[f"C{i}" for i in range(len(ratios))])
    axes[0].bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes[0].axvline(1.0, color="0.5", linewidth=1)
    axes[0].invert_yaxis()
    axes[0].set(title=f"x{expand}, all workloads", xlabel="tokens per second against off (geometric mean)")


def _reliability(axes: list[Any], report: PolicyBenchReport, expand: int) -> None:
    axis = axes[0]
    axis.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    for c in (c for c in report.calibrations if c.expand == expand):
        filled = [i for i, count in enumerate(c.count) if count >= 10]
        axis.plot(
            [c.predicted[i] for i in filled],
            [c.observed[i] for i in filled],
            marker="o",
            markersize=4,
            label=f"{c.system}: ECE {c.ece:.3f}",
        )
    axis.set(title=f"x{expand}", xlabel="predicted acceptance", ylabel="observed", xlim=(0, 1), ylim=(0, 1))
    axis.legend(fontsize=7)
