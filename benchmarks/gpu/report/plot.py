"""All plots of a GPU bench report in one figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLUMNS = 2


def write_plots(report: dict[str, Any], path: Path) -> bool:
    """Write a PNG; False if there is nothing to draw or matplotlib is not installed."""
    plots = [plot for data in report["sections"].values() for plot in data.get("plots", ())]
    if not plots:
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    num_rows = -(-len(plots) // COLUMNS)
    figure = Figure(figsize=(6.4 * COLUMNS, 4.2 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, COLUMNS, squeeze=False)
    for place in range(num_rows * COLUMNS):
        axis = axes[place // COLUMNS][place % COLUMNS]
        if place >= len(plots):
            axis.axis("off")
            continue
        _draw(axis, plots[place])
    device = report["sections"].get("environment", {}).get("values", {}).get("device", "")
    dry = "dry run, the numbers mean nothing" if report["options"]["dry_run"] else device
    figure.suptitle(dry, fontsize=10)
    figure.savefig(path, dpi=110)
    return True


def _draw(axis: Any, plot: dict[str, Any]) -> None:
    for number, (label, (x, y)) in enumerate(plot["series"].items()):
        style = "-" if number < 10 else "--"  # colors repeat after ten
        axis.plot(x, y, style, marker="o", markersize=3, linewidth=1, label=label)
    if plot["log_x"]:
        axis.set_xscale("log", base=2)
    axis.set(title=plot["title"], xlabel=plot["x"], ylabel=plot["y"])
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=6)
