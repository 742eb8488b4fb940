"""The results as Markdown: a table per section, each system over its base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper.case import Result, Setting
from benchmarks.paper.sections import SECTIONS, Section


def render_markdown(results: Sequence[Result], environment: Mapping[str, Any]) -> str:
    lines = [
        "# The paper's table, simulated",
        "",
        f"All times are *modelled* ({environment['anchors']}); nothing ran on a GPU. Scheduler and policies are the "
        f"real ones. Command: `{environment['command_line']}`, commit {environment['git_commit']}.",
    ]
    for name, section in SECTIONS.items():
        found = [result for result in results if result.section == name]
        if found:
            lines += ["", f"## {section.title}", "", *_section(section, found)]
    return "\n".join(lines) + "\n"


def over_base(section: Section, results: Sequence[Result]) -> dict[Setting, dict[str, float]]:
    """Tokens per second by system, over the section's base."""
    rates: dict[Setting, dict[str, float]] = {}
    for result in results:
        rates.setdefault(result.setting, {})[result.system] = result.tokens_per_s
    return {
        setting: {system: rate / found[section.base] for system, rate in found.items()}
        for setting, found in rates.items()
    }


def _section(section: Section, results: Sequence[Result]) -> list[str]:
    systems = list(section.systems)
    lines = [
        f"Tokens per second over `{section.base}`; in brackets the rows that were pruned (p) and the steps that "
        "overlapped (o).",
        "",
        "| setting | " + " | ".join(systems) + " |",
        "|---" * (1 + len(systems)) + "|",
    ]
    by_key = {(result.setting, result.system): result for result in results}
    for setting, found in over_base(section, results).items():
        cells = [_cell(found[system], by_key[setting, system]) for system in systems if system in found]
        lines.append(f"| {_name(setting)} | " + " | ".join(cells) + " |")
    return lines


def _name(setting: Setting) -> str:
    words = [setting.gpu, setting.pair, f"load {setting.load_name}", f"acceptance {setting.acceptance:g}"]
    if setting.load:
        words.append(f"{setting.prompt_len} in, {setting.output_len} out")
    if setting.num_gpus > 1:
        words.append(f"{setting.num_gpus} GPUs")
    if setting.draft_sms:
        words.append(f"{setting.draft_sms} SMs draft")
    return ", ".join(words)


def _cell(ratio: float, result: Result) -> str:
    extra = [f"p {result.pruned:.0%}"] if result.pruned >= 0.005 else []
    extra += [f"o {result.overlapped:.0%}"] if result.overlapped >= 0.005 else []
    return f"{ratio:.3f}" + (f" ({', '.join(extra)})" if extra else "")
