"""A GPU bench report as Markdown: failures, then one heading per section with its recorded tables."""

from __future__ import annotations

from typing import Any

from benchmarks.common.markdown import table
from benchmarks.gpu.report.failures import failures, skipped


def render_markdown(report: dict[str, Any]) -> str:
    parts = [_head(report), _overview(report)]
    parts += [_section(name, data) for name, data in report["sections"].items()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: dict[str, Any]) -> str:
    env, options = report["environment"], report["options"]
    commit = f", commit {env['git_commit'][:12]}" if env["git_commit"] else ""
    changed = " with local changes" if env["git_dirty"] else ""
    device = report["sections"].get("environment", {}).get("values", {}).get("device", "device not read")
    lines = ["# faser bench gpu", "", *_failed(report), ""]
    if options["dry_run"]:
        lines += [
            "**Dry run on a CPU with tiny shapes: it shows that the suite runs; its numbers are meaningless.**",
            "",
        ]
    lines += [
        f"{env['date']}, {device}, {env['cpu']}{commit}{changed}, {report['seconds']:.0f} s.  ",
        f"`{env['command_line']}`",
    ]
    return "\n".join(lines)


def _failed(report: dict[str, Any]) -> list[str]:
    """Return failures in running order, since a failure may cause later ones."""
    failed, left_out = failures(report), skipped(report)
    lines = [f"Failed: {len(failed)} of {len(report['sections'])} sections", ""] if failed else ["Nothing failed."]
    lines += [f"{number}. `{name}`: {sentence}" for number, (name, sentence) in enumerate(failed, 1)]
    if left_out:
        lines += ["", "Skipped: " + "; ".join(f"`{name}`, {reason}" for name, reason in left_out)]
    return lines


def _overview(report: dict[str, Any]) -> str:
    rows = [
        (name, data["what"], data["status"], f"{data['seconds']:.0f}" if "seconds" in data else "-")
        for name, data in report["sections"].items()
    ]
    return table(("section", "what", "status", "s"), rows)


def _section(name: str, data: dict[str, Any]) -> str:
    parts = [f"## {name}: {data['what']}"]
    for item in data.get("tables", ()):
        parts.append(f"### {item['title']}")
        if item["note"]:
            parts.append(item["note"])
        parts.append(table(item["header"], item["rows"]))
    if data.get("notes"):
        parts.append("Not measured:\n\n" + "\n".join(f"- {line}" for line in data["notes"]))
    if data.get("errors"):
        parts.append("Failed:\n\n" + "\n".join(f"- {' '.join(line.split())}" for line in data["errors"]))
    return "\n\n".join(parts) if len(parts) > 1 else ""
