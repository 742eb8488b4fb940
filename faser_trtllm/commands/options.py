"""Flags that several commands share, and helpers to read flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.errors import InvalidArgumentError

EngineDirOption = Annotated[Path, typer.Option("--engine_dir", help="a directory that `faser build` wrote")]


FOREIGN_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Context settings of a command that passes unknown flags to judge_flags() of trtllm/convert/flags.py."""


def own_flags(ctx: typer.Context) -> tuple[str, ...]:
    """Return the long flags that the command declares itself, such as --port."""
    return tuple(flag for parameter in ctx.command.params for flag in parameter.opts if flag.startswith("--"))


def is_given(ctx: typer.Context, parameter: str) -> bool:
    """Return True if a parameter was given on the command line."""
    source = ctx.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas, such as "2,4"; raise InvalidArgumentError, which names `name`."""
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise InvalidArgumentError(f"{name} is {text!r}; it must be whole numbers as in 2,4") from None
