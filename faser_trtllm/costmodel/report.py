"""The validation as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.costmodel.anchors import anchors_version
from faser_trtllm.costmodel.validation import SOURCES, Comparison, by_group, mean_error


def render_validation(comparisons: Sequence[Comparison]) -> str:
    """Errors by group, then every point, then the sources."""
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
        lines += [f"| {c.point.what} | {c.point.measured:.4g} | {c.modelled:.4g} | {c.error:+.1%} |" for c in found]
    lines += ["", *(f"- [{key}] {text}" for key, text in SOURCES.items())]
    return "\n".join(lines) + "\n"


def _unit(kind: str) -> str:
    return " in ms" if kind in ("tpot", "pass", "step per token") else ""
