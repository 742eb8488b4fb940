"""`faser bench paper`: all sections in sequence, with results written after each setting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common.environment import describe_environment
from benchmarks.paper.arithmetic import Answer
from benchmarks.paper.case import Result, run_case
from benchmarks.paper.markdown import render_markdown
from benchmarks.paper.plot import write_plots
from benchmarks.paper.sections import QUESTIONS, SECTIONS
from faser_trtllm.errors import InvalidArgumentError
from lab.costmodel.anchors import anchors_version

JSON_FILE, TEXT_FILE = "paper.json", "paper.md"


@dataclass(frozen=True)
class PaperBenchOptions:
    """Options of the bench. sections: names in SECTIONS and QUESTIONS."""

    output_dir: Path
    sections: tuple[str, ...] = ("baselines", "sharing", "ablation", "adaptive", "context", "static", "overlap")
    minutes: float = 55.0
    command_line: tuple[str, ...] = ()


def run_paper_bench(options: PaperBenchOptions, say: Callable[[str], None] = lambda line: None) -> list[Result]:
    """Simulate the sections; settings that do not fit into the time are left out, and named at the end."""
    output_dir, sections, minutes = options.output_dir, options.sections, options.minutes
    for name in sections:
        if name not in (*SECTIONS, *QUESTIONS):
            raise InvalidArgumentError(f"section is {name!r}, there are {', '.join((*SECTIONS, *QUESTIONS))}")
    if not minutes > 0:
        raise InvalidArgumentError(f"minutes is {minutes}; it must be more than 0")
    output_dir.mkdir(parents=True, exist_ok=True)
    environment = describe_environment(options.command_line) | {"anchors": anchors_version(), "times": "modeled"}
    deadline_s = time.monotonic() + 60.0 * minutes
    results: list[Result] = []
    answers: dict[str, list[Answer]] = {}
    left_out = 0

    def write() -> None:
        data = {
            "environment": environment,
            "results": [asdict(result) for result in results],
            "answers": {name: [asdict(answer) for answer in found] for name, found in answers.items()},
        }
        (output_dir / JSON_FILE).write_text(json.dumps(data, indent=1) + "\n")
        (output_dir / TEXT_FILE).write_text(render_markdown(results, environment, answers))

    for name in sections:
        if name in QUESTIONS:
            say(f"{name}: by arithmetic")
            answers[name] = list(QUESTIONS[name].answers(QUESTIONS[name].settings))
            write()
            continue
        section = SECTIONS[name]
        for setting in section.settings:
            if time.monotonic() > deadline_s:
                left_out += 1
                continue
            for system, speculation in section.systems.items():
                found = run_case(name, setting, system, speculation, section.max_draft_len)
                results.append(found)
                say(
                    f"{name}: {setting.gpu} {setting.pair} at {setting.load_name}, {system}: "
                    f"{found.tokens_per_s:.0f} tokens/s, {found.wall_s:.1f} s"
                )
            write()
    write_plots(results, answers, output_dir)
    if left_out:
        say(f"{left_out} settings did not fit into {minutes:g} minutes")
    return results
