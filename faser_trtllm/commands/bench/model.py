"""`faser bench model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.costmodel.own_points import read_own_points
from faser_trtllm.costmodel.report import render_own, render_validation
from faser_trtllm.costmodel.validation import compare_all

EXAMPLES = "Example: faser bench model --output_file cost_model.md"


def model(
    output_file: Annotated[Path | None, typer.Option("--output_file", help="write it here instead")] = None,
) -> None:
    """Compare the GPU cost model with public measurements and with our own on an H100.

    Needs no GPU: the points and the model's anchors are in the package.
    """
    text = f"{render_own(read_own_points())}\n{render_validation(compare_all())}"
    if output_file is None:
        print(text, end="")
    else:
        output_file.write_text(text)
