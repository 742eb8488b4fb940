"""The results as Markdown: a table per section, each system over its base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.paper.arithmetic import Answer
from benchmarks.paper.case import Result, Setting
from benchmarks.paper.sections import PRICE, QUESTIONS, SECTIONS, Section


def render_markdown(
    results: Sequence[Result], environment: Mapping[str, Any], answers: Mapping[str, Sequence[Answer]] | None = None
) -> str:
    lines = [
        "# The paper's table, simulated",
        "",
        f"All times are *modeled* ({environment['anchors']}); nothing ran on a GPU. Scheduler and policies are the "
        f"real ones. Command: `{environment['command_line']}`, commit {environment['git_commit']}.",
    ]
    for name, section in SECTIONS.items():
        found = [result for result in results if result.section == name]
        if found:
            lines += ["", f"## {section.title}", "", *_section(section, found)]
    for name, of_question in (answers or {}).items():
        lines += ["", f"## {QUESTIONS[name].title}", "", *_question(of_question)]
    return "\n".join(lines) + "\n"


def over_base(section: Section, results: Sequence[Result]) -> dict[Setting, dict[str, list[float]]]:
    """Return tokens per second by system over the section's base, for each seed."""
    rates: dict[Setting, dict[str, float]] = {}
    for result in results:
        rates.setdefault(result.setting, {})[result.system] = result.tokens_per_s
    found: dict[Setting, dict[str, list[float]]] = {}
    for setting, by_system in rates.items():
        ratios = found.setdefault(replace(setting, seed=0), {})
        for system, rate in by_system.items():
            ratios.setdefault(system, []).append(rate / by_system[section.base])
    return found


def ahead_of_best(ratios: Mapping[str, Sequence[float]], system: str = PRICE) -> list[float]:
    """Return a system's ratio to the best of the others, for each seed."""
    best = [max(values) for values in zip(*(v for name, v in ratios.items() if name != system), strict=True)]
    return [mine / other for mine, other in zip(ratios[system], best, strict=True)]


def _section(section: Section, results: Sequence[Result]) -> list[str]:
    systems = list(section.systems)
    compares = section.name == "static"
    lines = [
        f"Tokens per second over `{section.base}`, means over seeds; in brackets the rows that were pruned (p) and the "
        "steps that overlapped (o)." + (" Last: price over the best of the others, by seed." if compares else ""),
        "",
        "| setting | " + " | ".join([*systems, *(["ahead by"] if compares else [])]) + " |",
        "|---" * (1 + len(systems) + compares) + "|",
    ]
    by_key = {(result.setting, result.system): result for result in results}
    for setting, found in over_base(section, results).items():
        cells = [_cell(found[system], by_key[setting, system]) if system in found else "" for system in systems]
        if compares:
            cells.append(", ".join(f"{100 * (ratio - 1):+.1f} %" for ratio in ahead_of_best(found)))
        lines.append(f"| {_name(setting)} | " + " | ".join(cells) + " |")
    return lines


def _question(answers: Sequence[Answer]) -> list[str]:
    systems = list(answers[0].rates)
    lines = [
        f"By the cost model's arithmetic, tokens per ms over `{answers[0].base}`, each system at its best length, tree "
        "or split; the SMs are those that draft at the best split.",
        "",
        "| setting | " + " | ".join([*systems, "SMs"]) + " |",
        "|---" * (2 + len(systems)) + "|",
    ]
    for answer in answers:
        cells = [*(f"{answer.ratios[system]:.2f}" for system in systems), str(answer.draft_sms)]
        lines.append(f"| {_name(answer.setting)} | " + " | ".join(cells) + " |")
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


def _cell(ratios: Sequence[float], result: Result) -> str:
    extra = [f"p {result.pruned:.0%}"] if result.pruned >= 0.005 else []
    extra += [f"o {result.overlapped:.0%}"] if result.overlapped >= 0.005 else []
    return f"{sum(ratios) / len(ratios):.3f}" + (f" ({', '.join(extra)})" if extra else "")
