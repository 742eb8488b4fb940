"""The validation against public figures and our own, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.model.own_points import OwnPoint, own_groups
from benchmarks.model.validation import SOURCES, Comparison, by_group, mean_error
from lab.costmodel.anchors import anchors_version


def render_validation(comparisons: Sequence[Comparison]) -> str:
    """Return errors by group, then every point, then the sources."""
    lines = [
        f"Anchors: {anchors_version()}. Errors are the model's, as a share of what was measured. Nothing here was "
        "measured by us.",
        "",
        "| group | points | mean error | mean absolute | worst |",
        "|---|---|---|---|---|",
    ]
    for group, found in by_group(comparisons).items():
        bias = sum(c.error for c in found) / len(found)
        worst = max((c.error for c in found), key=abs)
        lines.append(f"| {group} | {len(found)} | {bias:+.1%} | {mean_error(found):.1%} | {worst:+.1%} |")
    for group, found in by_group(comparisons).items():
        point = found[0].point
        lines += ["", f"**{group}**, {point.kind}{_unit(point.kind)} [{point.source}]", ""]
        lines += ["| point | measured | model | error |", "|---|---|---|---|"]
        lines += [f"| {c.point.what} | {c.point.measured:.4g} | {c.modeled:.4g} | {c.error:+.1%} |" for c in found]
    lines += ["", *(f"- [{key}] {text}" for key, text in SOURCES.items())]
    return "\n".join(lines) + "\n"


def render_own(points: Sequence[OwnPoint]) -> str:
    """Return errors by group, before and after the model was corrected by these points."""
    lines = [
        "Measured on an H100, 2026-11-26: the `cuda` backend, the demo pair enlarged to 8B and 0.3B "
        "(`benchmarks/model/data/h100_points.csv`). Mean error, mean absolute error and the worst one, of the "
        "model as it was before these points and as it is.",
        "",
        "| group | points | before | absolute | worst | now | absolute | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group, found in own_groups(points).items():
        cells = _errors([point.error_before for point in found]) + _errors([point.error for point in found])
        lines.append(f"| {group} | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _errors(errors: Sequence[float]) -> list[str]:
    return [f"{fmean(errors):+.1%}", f"{fmean(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"]


def _unit(kind: str) -> str:
    return " in ms" if kind in ("tpot", "pass", "step per token") else ""
