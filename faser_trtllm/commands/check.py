"""`faser check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.checkout import import_from_checkout
from faser_trtllm.errors import InvalidArgumentError

EXAMPLES = "Examples: faser check --engine_dir engines/built/demo; faser check --trtllm"


def check(
    engine_dir: Annotated[
        Path | None, typer.Option("--engine_dir", help="a directory that `faser build` wrote")
    ] = None,
    trtllm: Annotated[
        bool,
        typer.Option("--trtllm", help="compare the installed TensorRT-LLM with the one that our adapters support"),
    ] = False,
) -> None:
    """Check an engine directory, or the installed TensorRT-LLM.

    Compares every file with its hash, and generates a few tokens with and without drafts, which must agree.
    """
    if trtllm:
        code = import_from_checkout("lab.trtllm_check.command", "--trtllm").check_tensorrt_llm()
        if code or engine_dir is None:
            raise typer.Exit(code)
    if engine_dir is None:
        raise InvalidArgumentError("there is nothing to check; give --engine_dir, or --trtllm for TensorRT-LLM")
    from faser_trtllm.serving.launch.check import check_engine_dir

    for line in check_engine_dir(engine_dir):
        print(line, flush=True)
