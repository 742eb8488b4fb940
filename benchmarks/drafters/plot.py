"""Plots of tokens per pass and of draft steps, by workload and system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_plot(report: Mapping[str, Any], path: Path) -> bool:
    """Write a PNG of drafters.json; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    results: Mapping[str, Mapping[str, Mapping[str, Any]]] = report["results"]
    figure = Figure(figsize=(4.2 * len(results), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axis, (workload, systems) in zip(axes, results.items(), strict=True):
        names = list(systems)[::-1]
        places = range(len(names))
        tokens = [systems[name]["tokens"] / systems[name]["passes"] for name in names]
        steps = [systems[name]["draft_steps"] / systems[name]["passes"] for name in names]
        axis.barh(places, tokens, height=0.7, label="tokens per pass")
        axis.scatter(steps, places, color="black", marker="|", s=120, label="draft steps per pass")
        axis.set(title=workload, yticks=places, xlim=(0, None))
        axis.set_yticklabels(names, fontsize=7)
        axis.legend(fontsize=7, loc="upper right")
    figure.suptitle(f"{report['environment']['cpu']}, one stream", fontsize=10)
    figure.savefig(path, dpi=120)
    return True
