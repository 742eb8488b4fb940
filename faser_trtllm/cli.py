"""The `faser` command: build, profile, generate, serve, check, bench. Flags are spelled as trtllm-build's.

Exit code 0 on success, 2 for bad input (one sentence on stderr, with the fix), 1 if something broke. Only the chosen
command is imported: its module, and typer for its flags.
"""

from __future__ import annotations

import sys
import textwrap

from faser_trtllm.commands.table import COMMANDS, GROUPS, HELP_FLAGS, import_command, load
from faser_trtllm.errors import FaserError, InvalidArgumentError

ABOUT = "Speculative decoding managed at the grain of one row of one request."
HELP_WIDTH = 80  # columns


def main() -> None:
    """Entry point: user errors become one sentence and exit code 2."""
    try:
        _run(sys.argv[1:])
    except FaserError as error:
        print(f"faser: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(arguments: list[str]) -> None:
    group = arguments.pop(0) if arguments and arguments[0] in GROUPS else ""
    if not arguments or arguments[0] in HELP_FLAGS:
        print(_help(group))
        sys.exit(0 if arguments else 2)
    name = f"{group} {arguments[0]}".strip()
    if name not in COMMANDS:
        what = "option" if arguments[0].startswith("-") else "command"
        raise InvalidArgumentError(
            f"there is no {what} {name!r}; `{f'faser {group}'.strip()} --help` lists the commands"
        )
    if name == "version" and len(arguments) == 1:  # importing typer would take longer than all the rest
        import_command(name)[1]()
        sys.exit(0)
    load(name)(args=arguments[1:], prog_name=f"faser {name}")


def _help(group: str) -> str:
    """What `faser --help` and `faser GROUP --help` print."""
    rows = {name.removeprefix(f"{group} "): command.help for name, command in COMMANDS.items() if _group(name) == group}
    if not group:
        rows |= GROUPS
    indent = max(map(len, rows)) + 4
    lines = [f"Usage: {f'faser {group}'.strip()} COMMAND [OPTIONS]", "", GROUPS.get(group, ABOUT), "", "Commands:"]
    for name, text in rows.items():
        lines += textwrap.wrap(f"  {name:<{indent - 2}}{text}", HELP_WIDTH, subsequent_indent=" " * indent)
    return "\n".join([*lines, "", "`--help` behind a command shows its options and examples."])


def _group(name: str) -> str:
    return name.rpartition(" ")[0]


if __name__ == "__main__":
    main()
