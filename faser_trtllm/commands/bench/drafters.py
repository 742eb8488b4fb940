"""`faser bench drafters`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.checkout import use_benchmarks
from faser_trtllm.commands.options import EngineDirOption

EXAMPLES = "Example: faser bench drafters --engine_dir engines/built/demo --output_dir bench_results"
SYSTEMS = "off,fixed:8/suffix,fixed:4/model,fixed:8/suffix+model,price/suffix,price/model,price/suffix+model"


def drafters(
    engine_dir: EngineDirOption,
    output_dir: Annotated[
        Path, typer.Option("--output_dir", help="where drafters.json, drafters.md and drafters.png go")
    ],
    systems: Annotated[
        str,
        typer.Option(
            "--systems", help="speculation/drafters or speculation/drafters/num_branches, separated by commas; or off"
        ),
    ] = SYSTEMS,
    num_jobs: Annotated[int, typer.Option("--num_jobs", help="prompts per workload")] = 20,
    max_tokens: Annotated[int, typer.Option("--max_tokens", help="of a completion")] = 144,
    num_rounds: Annotated[int, typer.Option("--num_rounds", help="of all systems, interleaved")] = 3,
    num_threads: Annotated[int | None, typer.Option("--num_threads", help="default: all cores")] = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="run the engines for the tokens, and take the times from the cost table")
    ] = False,
) -> None:
    """Compare who drafts: a draft model, the text itself, or both.

    Each completes held-out text, greedily and at temperature 0.8, and makes edits whose answers are replayed.
    """
    use_benchmarks()
    from benchmarks.drafters.runner import DrafterBenchOptions, run_drafter_bench

    options = DrafterBenchOptions(
        engine_dir=engine_dir,
        output_dir=output_dir,
        systems=tuple(systems.split(",")),
        num_jobs=num_jobs,
        num_tokens=max_tokens,
        num_rounds=num_rounds,
        num_threads=num_threads,
        simulated=simulated,
        command_line=tuple(sys.argv),
    )
    run_drafter_bench(options, lambda line: print(line, file=sys.stderr, flush=True))
    print((output_dir / "drafters.md").read_text())
