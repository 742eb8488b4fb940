"""`faser bench host`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.checkout import use_benchmarks
from faser_trtllm.commands.options import numbers

EXAMPLES = (
    "Examples: faser bench host --output_dir host_results --requests 32,256 --policies off,price/suffix+model; "
    "faser bench host --output_dir gpu_host --engines gpu"
)


def host(
    output_dir: Annotated[Path, typer.Option("--output_dir", help="where host.json, host.md and host.png go")],
    requests: Annotated[
        str, typer.Option("--requests", help="requests that decode at once")
    ] = "1,2,4,8,16,32,64,128,256,512",
    policies: Annotated[
        str, typer.Option("--policies", help="as --speculation spells them, with /drafters behind")
    ] = "off,fixed:4,price",
    engines: Annotated[
        str, typer.Option("--engines", help="null: not counted; gpu: ours, with what they cost the host, without a GPU")
    ] = "null",
    rounds: Annotated[int, typer.Option("--rounds", help="of all policies and sizes in turn")] = 5,
    steps: Annotated[int, typer.Option("--steps", help="that are timed, of each")] = 64,
    quick: Annotated[bool, typer.Option("--quick", help="a short run for a first look")] = False,
) -> None:
    """Measure what a step costs the host, with engines that compute nothing."""
    use_benchmarks()
    from benchmarks.host.options import HostBenchOptions
    from benchmarks.host.runner import TEXT_FILE, run_host_bench

    options = HostBenchOptions(
        output_dir=output_dir,
        num_requests=numbers("requests", requests),
        systems=tuple(policies.split(",")),
        num_rounds=rounds,
        num_steps=steps,
        engines=engines,
        command_line=tuple(sys.argv),
    )
    run_host_bench(options.quick() if quick else options, lambda line: print(line, file=sys.stderr, flush=True))
    print((output_dir / TEXT_FILE).read_text())
