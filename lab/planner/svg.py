"""Plots as SVG text: bars with error bands, and lines. Colors follow the page's (currentColor)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from lab.planner.plan import Band

WIDTH, ROW, LABEL, GAP = 720, 22, 150, 150  # pixels: plot, bar, left and right of the bars
HEIGHT = 240  # pixels of a line plot
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")


def bars(title: str, values: Mapping[str, Band], unit: str, digits: int = 0, marked: str = "") -> str:
    """Plot a bar per label, with a line from low to high; `marked` has a stronger color."""
    most = max((band.high for band in values.values()), default=1.0) or 1.0
    scale = (WIDTH - LABEL - GAP) / most
    parts = []
    for row, (label, band) in enumerate(values.items()):
        y, middle = 26 + row * ROW, 26 + row * ROW + ROW / 2 - 2
        low, value, high = (LABEL + scale * x for x in (band.low, band.value, band.high))
        figure = f"{band.value:,.{digits}f} ({band.low:,.{digits}f}-{band.high:,.{digits}f})"
        parts += [
            f"<g><title>{escape(label)}: {figure} {escape(unit)}</title>",
            _text(LABEL - 8, middle + 4, label, anchor="end"),
            f'<rect x="{LABEL}" y="{y}" width="{max(0.0, value - LABEL):.1f}" height="{ROW - 6}" '
            f'fill="{COLORS[0]}" fill-opacity="{1.0 if label == marked else 0.55}"/>',
            f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 4:.1f}v8M{high:.1f} {middle - 4:.1f}v8" '
            'stroke="currentColor" fill="none"/>',
            _text(high + 6, middle + 4, figure),
            "</g>",
        ]
    return _svg(f"{title}, {unit}", 30 + ROW * len(values), parts)


def lines(title: str, series: Mapping[str, Sequence[float]], x_label: str) -> str:
    """Plot a line per label over 0, 1, 2, ..."""
    most = max((max(values, default=0.0) for values in series.values()), default=0.0) or 1.0
    longest = max((len(values) for values in series.values()), default=1)
    left, right, top, bottom = 60, WIDTH - LABEL, 30, HEIGHT - 30
    step = 10.0 ** math.floor(math.log10(most))
    parts = []
    for tick in range(int(most / step) + 1):
        y = bottom - (bottom - top) * tick * step / most
        parts += [f'<path d="M{left} {y:.1f}H{right}" stroke="currentColor" stroke-opacity="0.15"/>']
        parts += [_text(left - 6, y + 4, f"{tick * step:,.0f}", anchor="end")]
    for index, (label, values) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        points = [
            f"{left + (right - left) * (x + 0.5) / longest:.1f},{bottom - (bottom - top) * v / most:.1f}"
            for x, v in enumerate(values)
        ]
        y = top + 18 * index
        parts += [f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>']
        parts += [
            f'<path d="M{right + 10} {y}h16" stroke="{color}" stroke-width="3"/>',
            _text(right + 32, y + 4, label),
        ]
    parts.append(_text((left + right) / 2, HEIGHT - 8, x_label, anchor="middle"))
    return _svg(title, HEIGHT, parts)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, _text(0, 14, title, weight="bold"), *parts, "</svg>"])


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" font-size="12" fill="currentColor"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
