"""Write docs/reference/cli.md: the commands of `faser` and their flags, from the commands themselves.

    python scripts/write_cli_reference.py [--check]

--check: write nothing, exit with 1 if the page is old.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from faser_trtllm.commands.benches import bench_lines
from faser_trtllm.commands.table import COMMANDS, load
from faser_trtllm.core.request_field import rows
from faser_trtllm.core.sampling_params import SamplingFields

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"
HEAD = """# Commands and flags

With this page you can look up every command of `faser` and every flag with its default.

`faser COMMAND --help` prints the same with examples. A flag without a default is optional unless it is marked as
required. `scripts/write_cli_reference.py` writes this page from the commands.
"""
SAMPLING = {f"--{row.name}" for row in rows(SamplingFields)}


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    first_command: dict[tuple[str, str], str] = {}  # which has a flag with this help
    for name, command in COMMANDS.items():
        parts.append(f"## faser {name}\n\n{command.help}\n")
        if name == "bench":
            parts.append(_table(("bench", "what it does"), ((f"`{one}`", line) for one, line in bench_lines().items())))
            continue
        parameters = typer.main.get_command(load(name)).params
        flags = [_row(parameter, name, first_command) for parameter in parameters if not _is_sampling(name, parameter)]
        if flags:
            parts.append(_table(("flag", "default", "meaning"), flags))
        if len(flags) < len(parameters):
            parts.append("The other flags are the sampling parameters of [request fields](request_fields.md).\n")
    return "\n".join(parts)


def _is_sampling(command: str, parameter: Any) -> bool:
    return command == "generate" and bool(SAMPLING.intersection(parameter.opts))


def _row(parameter: Any, command: str, first_command: dict[tuple[str, str], str]) -> tuple[str, str, str]:
    names = [name for name in parameter.opts if "-" not in name.lstrip("-")] or parameter.opts
    text = parameter.help or ""
    first = first_command.setdefault((names[0], text), command)
    meaning = text if first == command or len(text) < 40 else f"see `faser {first}`"
    return " ".join(f"`{name}`" for name in names), _default(parameter), meaning.replace("|", "\\|")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.is_flag if parameter.param_type_name == "option" else False:
        return "off"
    return "" if parameter.default in (None, "") else f"`{parameter.default}`"


def _table(titles: tuple[str, ...], lines: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> str:
    return "".join(f"|{'|'.join(cells)}|\n" for cells in (titles, ("---",) * len(titles), *lines))


def main(arguments: list[str]) -> int:
    text = page()
    if PAGE.is_file() and PAGE.read_text() == text:
        return 0
    if arguments == ["--check"]:
        print(f"{PAGE} is old; run python scripts/write_cli_reference.py", file=sys.stderr)
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
