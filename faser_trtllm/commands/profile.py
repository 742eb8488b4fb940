"""`faser profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.options import EngineDirOption
from faser_trtllm.commands.progress import ProgressBar

EXAMPLES = "Example: faser profile --engine_dir engines/built/demo"


def profile(
    engine_dir: EngineDirOption,
    quick: Annotated[
        bool, typer.Option("--quick", help="take a few seconds and leave out the calibration of pruning")
    ] = False,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt_file", help="prompts to calibrate pruning on, one per line")
    ] = None,
    num_threads: Annotated[int | None, typer.Option("--num_threads", help="default: all cores")] = None,
) -> None:
    """Measure what drafting and verification cost on this machine.

    Writes profile.json beside the engines. `faser build` makes a quick profile; this one takes longer and is better.
    """
    from faser_trtllm.profiling.options import ProfileOptions
    from faser_trtllm.profiling.profile import profile_engine_dir

    options = ProfileOptions(engine_dir, quick=quick, prompt_file=prompt_file, num_threads=num_threads)
    with ProgressBar() as progress:
        report = profile_engine_dir(options, progress)
    for kind, error in sorted(report.table.held_out_errors.items()):
        print(f"{kind}: {100 * error:.1f} % mean error on held-out points")
    print(f"measured in {report.seconds:.0f} s: {engine_dir / 'profile.json'}")
