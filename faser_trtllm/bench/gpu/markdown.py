"""A GPU bench report as Markdown: one heading per section, the tables that it recorded."""

from __future__ import annotations

from typing import Any

from faser_trtllm.bench.markdown import table


def render_markdown(report: dict[str, Any]) -> str:
    parts = [_head(report), _overview(report)]
    parts += [_section(name, data) for name, data in report["sections"].items()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: dict[str, Any]) -> str:
    env, options = report["environment"], report["options"]
    commit = f", commit {env['git_commit'][:12]}" if env["git_commit"] else ""
    changed = " with local changes" if env["git_dirty"] else ""
    device = report["sections"].get("environment", {}).get("values", {}).get("device", "device not read")
    lines = ["# faser bench gpu", ""]
    if options["dry_run"]:
        lines += ["**Dry run on a CPU with tiny shapes: it shows that the suite runs, its numbers mean nothing.**", ""]
    lines += [
        f"{env['date']}, {device}, {env['cpu']}{commit}{changed}, {report['seconds']:.0f} s.  ",
        f"`{env['command_line']}`",
    ]
    return "\n".join(lines)


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
    if data.get("errors"):
        parts.append("Failed:\n\n" + "\n".join(f"- {' '.join(line.split())}" for line in data["errors"]))
    return "\n\n".join(parts) if len(parts) > 1 else ""
