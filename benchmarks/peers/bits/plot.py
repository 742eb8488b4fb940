"""Plot a report at equal bits: the time of every peer over ours, by cell."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.bits.report import BitsReport, ratio


def write_plot(report: BitsReport, path: Path) -> bool:
    """Write a PNG; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    models = list(dict.fromkeys(result.model for result in report.results))
    bits = list(dict.fromkeys(result.bits for result in report.results))
    figure = Figure(figsize=(4.2 * len(bits), 3.4 * len(models)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(models), len(bits), squeeze=False)
    for row, model in zip(axes, models, strict=True):
        for axis, kind in zip(row, bits, strict=True):
            series: dict[str, list[tuple[str, float]]] = {}
            for ours, rivals in report.cells():
                if (ours.model, ours.bits) == (model, kind):
                    for rival in rivals:
                        series.setdefault(rival.system, []).append((ours.cell, ratio(rival, ours).median))
            for name, points in series.items():
                axis.plot([cell for cell, _ in points], [value for _, value in points], marker="o", label=name)
            axis.axhline(1, color="black", linewidth=0.8)
            axis.set_title(f"{model}, {kind}", fontsize=10)
            axis.set_xlabel("rows")
            axis.set_ylabel("peer's time over ours")
            axis.set_ylim(bottom=0)
            if series:
                axis.legend(fontsize=7, loc="upper left")
    figure.suptitle(f"{report.environment['cpu']}, {report.options['num_threads']} threads; above 1 ours is faster")
    figure.savefig(path, dpi=150)
    return True
