"""Plot a profile: times by rows, draft steps, held-out points, early exit by depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from faser_trtllm.core.cost_table import ALL
from faser_trtllm.profiling.report import ProfileReport, predict


def write_plot(report: ProfileReport, path: Path) -> bool:
    """Write a PNG; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    num_panels = 4 if report.exit_quality else 3
    figure = Figure(figsize=(4.6 * num_panels, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, num_panels)
    _stairs(axes[0], report)
    _draft(axes[1], report)
    _held_out(axes[2], report)
    if report.exit_quality:
        _exits(axes[3], report)
    figure.suptitle(f"{report.table.fingerprint.cpu_model}, {report.table.fingerprint.num_threads} threads")
    figure.savefig(path, dpi=130)
    return True


def _stairs(axis: Any, report: ProfileReport) -> None:
    for number, partition in enumerate(report.table.partitions):
        samples = [s for s in report.samples if s.kind == "verify" and s.partition == partition]
        contexts = sorted({s.context_len for s in samples if s.num_rows == s.num_requests == 1})
        context = min(contexts, key=lambda c: abs(c - 256), default=256)
        rows = np.arange(1, max(s.num_rows for s in samples) + 1)
        ms = [report.table.verify_ms(n, max(1, n // 5), context, partition) for n in rows.tolist()]
        axis.plot(rows, ms, color=f"C{number}", label=partition)
        axis.plot([s.num_rows for s in samples], [s.ms for s in samples], ".", color=f"C{number}", alpha=0.5)
    axis.set(title="target pass", xlabel="rows", ylabel="ms", ylim=(0, None))
    axis.legend(fontsize=8)


def _draft(axis: Any, report: ProfileReport) -> None:
    partitions = [p for p in ("all", "draft") if report.table.has("draft_step", p)]
    for number, partition in enumerate(partitions):
        samples = [s for s in report.samples if s.kind == "draft_step" and s.partition == partition]
        requests = np.arange(1, max(s.num_requests for s in samples) + 1)
        ms = [report.table.draft_step_ms(int(r), 256, partition) for r in requests]
        axis.plot(requests, ms, color=f"C{number}", label=partition)
        axis.plot([s.num_requests for s in samples], [s.ms for s in samples], ".", color=f"C{number}", alpha=0.5)
    axis.set(title="one draft step", xlabel="requests", ylabel="ms", ylim=(0, None))
    axis.legend(fontsize=8)


def _held_out(axis: Any, report: ProfileReport) -> None:
    for number, (kind, error) in enumerate(report.table.held_out_errors.items()):
        samples = [s for s in report.held_out if s.kind == kind and s.partition == ALL]
        axis.loglog(
            [s.ms for s in samples],
            [predict(report.table, s) for s in samples],
            "o",
            color=f"C{number}",
            label=f"{kind}: MAPE {100 * error:.1f}%",
        )
    low, high = min(axis.get_xlim()[0], axis.get_ylim()[0]), max(axis.get_xlim()[1], axis.get_ylim()[1])
    axis.plot([low, high], [low, high], color="0.6", linewidth=1)
    axis.set(title="held-out points", xlabel="measured ms", ylabel="predicted ms")
    axis.legend(fontsize=8)


def _exits(axis: Any, report: ProfileReport) -> None:
    for number, layer in enumerate(sorted({q.layer for q in report.exit_quality})):
        points = sorted((q for q in report.exit_quality if q.layer == layer), key=lambda q: q.recall)
        axis.plot(
            [q.recall for q in points], [q.precision for q in points], "o-", color=f"C{number}", label=f"layer {layer}"
        )
        axis.plot(
            [q.baseline_recall for q in points],
            [q.baseline_precision for q in points],
            ":",
            color=f"C{number}",
            alpha=0.6,
        )
    axis.set(title="early exit (dotted: draft confidence)", xlabel="recall", ylabel="precision", ylim=(0, 1.02))
    axis.legend(fontsize=8)
