"""What the commands' flags have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.errors import InvalidArgumentError

EngineDirOption = Annotated[Path, typer.Option("--engine_dir", help="a directory that `faser build` wrote")]


def numbers(name: str, text: str) -> tuple[int, ...]:
    """ "2,4" -> (2, 4); InvalidArgumentError that names the flag otherwise."""
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise InvalidArgumentError(f"{name} is {text!r}, it must be whole numbers as in 2,4") from None
