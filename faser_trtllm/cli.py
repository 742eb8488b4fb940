"""The `faser` command. Its flags are spelled like those of trtllm-build.

The exit code is 0 on success, 2 for bad input (one sentence on stderr, with the fix) and 1 for any other failure.
Only the module of the chosen command is imported.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn

from faser_trtllm.commands.table import COMMANDS, HELP_FLAGS, import_command, listing, load
from faser_trtllm.errors import FaserError, InvalidArgumentError

ABOUT = "Speculative decoding with a draft length per request and step, for TensorRT-LLM and NVIDIA Triton."


def main() -> None:
    """Run the command line; user errors become one sentence and exit code 2."""
    # Commands talk to servers on this machine over urllib and gRPC, which a proxy cannot reach.
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = ",".join(filter(None, (known, "localhost,127.0.0.1,::1")))
    try:
        try:
            _run(sys.argv[1:])
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except FaserError as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes standard output once more when it exits
        if error.errno == errno.EPIPE:
            sys.exit(1)
        where = f"{error.filename} is" if error.filename else "standard output or another file is"
        _refuse(f"{where} on a full disk ({error.strerror}); free space or write elsewhere")


def _refuse(sentence: str) -> NoReturn:
    print(f"faser: {sentence}", file=sys.stderr)
    sys.exit(2)


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
