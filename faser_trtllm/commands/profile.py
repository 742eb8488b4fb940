"""`faser profile`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.progress import ProgressBar
from faser_trtllm.errors import ConfigError, InvalidArgumentError, reason_of

EXAMPLES = "Examples: faser profile --engine_dir engines/built/demo; faser profile --refit profile.json --json"


def profile(
    engine_dir: Annotated[
        Path | None, typer.Option("--engine_dir", help="a directory that `faser build` wrote")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="take a few seconds; skip the calibration of pruning")] = False,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt_file", help="prompts to calibrate pruning on, one per line")
    ] = None,
    num_threads: Annotated[int | None, typer.Option("--num_threads", help="CPU threads; default: all cores")] = None,
    refit: Annotated[
        Path | None, typer.Option("--refit", help="measure nothing; report how well curves fit this profile.json")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="with --refit: print one JSON object")] = False,
) -> None:
    """Measure what drafting and verification cost on this machine.

    Writes profile.json next to the engines. It takes longer than the quick profile of `faser build` and is better.
    """
    if refit is not None:
        others = {"engine_dir": engine_dir, "quick": quick, "prompt_file": prompt_file, "num_threads": num_threads}
        for name, value in others.items():
            if value is not None and value is not False:
                raise InvalidArgumentError(f"is {value}, but --refit measures nothing; leave it out", name)
        _refit(refit, as_json)
        return
    if quick and prompt_file is not None:
        raise InvalidArgumentError(f"is {prompt_file}, but --quick calibrates nothing; leave one out", "prompt_file")
    if as_json:
        raise InvalidArgumentError("--json prints the errors of a recorded profile; add --refit FILE")
    if engine_dir is None:
        raise InvalidArgumentError(
            "engine_dir is not set; name a directory that `faser build` wrote with --engine_dir, or a recorded profile "
            "with --refit"
        )
    _measure(engine_dir, quick, prompt_file, num_threads)


def _measure(engine_dir: Path, quick: bool, prompt_file: Path | None, num_threads: int | None) -> None:
    from faser_trtllm.profiling.options import ProfileOptions
    from faser_trtllm.profiling.profile import profile_engine_dir
    from faser_trtllm.profiling.report import error_lines

    options = ProfileOptions(engine_dir, quick=quick, prompt_file=prompt_file, num_threads=num_threads)
    try:
        with ProgressBar() as progress:
            report = profile_engine_dir(options, progress)
    except OSError as error:
        raise ConfigError(
            f"the profile in {engine_dir} cannot be written: {reason_of(error)}; free space or permit it"
        ) from error
    print("\n".join(error_lines(report.table.errors)))
    print(f"measured in {report.seconds:.0f} s: {engine_dir / 'profile.json'}")


def _refit(path: Path, as_json: bool) -> None:
    from faser_trtllm.core.curve_error import describe
    from faser_trtllm.profiling.report import error_lines, refit_errors

    errors = refit_errors(path)
    if as_json:
        print(json.dumps({"curves": {key: asdict(error) for key, error in errors.items()}}))
        return
    print("\n".join(error_lines(errors)))
    if doubts := describe(errors):
        print(doubts)
