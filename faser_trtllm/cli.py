"""The `faser` command: build, profile, generate, serve, check, bench. Flags are spelled as trtllm-build's.

Exit code 0 on success, 2 for bad input (one sentence on stderr, with the fix), 1 if something broke. Only the chosen
command is imported: its module, and typer for its flags.
"""

from __future__ import annotations

import os
import sys

from faser_trtllm.commands.table import COMMANDS, HELP_FLAGS, import_command, listing, load
from faser_trtllm.errors import FaserError, InvalidArgumentError

ABOUT = "Speculative decoding managed at the grain of one row of one request."


def main() -> None:
    """Entry point: user errors become one sentence and exit code 2."""
    # Commands talk to servers of this machine, over urllib and gRPC: a company's proxy knows nothing of them.
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = ",".join(filter(None, (known, "localhost,127.0.0.1,::1")))
    try:
        _run(sys.argv[1:])
    except FaserError as error:
        print(f"faser: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in HELP_FLAGS:
        print(listing("faser", ABOUT, {name: command.help for name, command in COMMANDS.items()}))
        sys.exit(0 if arguments else 2)
    name, *rest = arguments
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        raise InvalidArgumentError(f"there is no {what} {name!r}; `faser --help` lists the commands")
    if name == "bench":
        sys.exit(import_command(name)[1](rest))
    if name == "version" and not rest:  # importing typer would take longer than all the rest
        import_command(name)[1]()
        sys.exit(0)
    load(name)(args=rest, prog_name=f"faser {name}")


if __name__ == "__main__":
    main()
