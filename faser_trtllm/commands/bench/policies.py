"""`faser bench policies`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.checkout import use_benchmarks
from faser_trtllm.commands.options import numbers

EXAMPLES = (
    "Example: faser bench policies --checkpoint_dir engines/demo/target --draft_checkpoint_dir engines/demo/draft "
    "--output_dir bench_results --quick"
)


def policies(
    checkpoint_dir: Annotated[Path, typer.Option("--checkpoint_dir", help="target checkpoint")],
    draft_checkpoint_dir: Annotated[Path, typer.Option("--draft_checkpoint_dir", help="draft checkpoint")],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="where policies.json, policies.md and the plots go")],
    expand: Annotated[str, typer.Option("--expand", help="sizes of the target, as multiples of its layers")] = "1,4",
    concurrency: Annotated[str, typer.Option("--concurrency", help="requests in flight")] = "1,2,4,8,16,32",
    fixed: Annotated[str, typer.Option("--fixed", help="draft lengths of the policies fixed:K")] = "1,2,3,4,5,6,7,8",
    systems: Annotated[
        str | None,
        typer.Option("--policies", help="policies beside off and fixed:K, by their labels in the report; default: all"),
    ] = None,
    bursty: Annotated[
        bool, typer.Option("--bursty/--no-bursty", help="also measure a trace whose load swings by a factor of 35")
    ] = True,
    minutes: Annotated[
        float, typer.Option("--minutes", help="time to measure for; what fits into it is reported")
    ] = 20.0,
    num_threads: Annotated[int | None, typer.Option("--num_threads", help="default: all cores")] = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="run the engines for the tokens, and take the times from cost tables")
    ] = False,
    cost_table: Annotated[
        Path | None, typer.Option("--cost_table", help="profile.json of the machine to simulate")
    ] = None,
    slowdown: Annotated[
        float, typer.Option("--slowdown", help="let a simulated machine be up to this many times slower for a while")
    ] = 1.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="a short run for a first look; its numbers are too noisy to quote")
    ] = False,
) -> None:
    """Compare the policies with each other and with the oracle.

    Each is measured at every concurrency, and on a trace whose load swings.
    """
    use_benchmarks()
    from benchmarks.policies.options import POLICIES, PolicyBenchOptions
    from benchmarks.policies.runner import run_policy_bench

    options = PolicyBenchOptions(
        checkpoint_dir=checkpoint_dir,
        draft_checkpoint_dir=draft_checkpoint_dir,
        output_dir=output_dir,
        expand=numbers("expand", expand),
        concurrency=numbers("concurrency", concurrency),
        fixed=numbers("fixed", fixed),
        policies=tuple(POLICIES) if systems is None else tuple(systems.split(",")),
        bursty=bursty,
        minutes=minutes,
        num_threads=num_threads,
        simulated=simulated,
        cost_table=cost_table,
        slowdown=slowdown,
        command_line=tuple(sys.argv),
    )
    run_policy_bench(options.quick() if quick else options, lambda line: print(line, file=sys.stderr, flush=True))
    print((output_dir / "policies.md").read_text())
