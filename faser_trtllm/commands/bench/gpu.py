"""`faser bench gpu`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.checkout import use_benchmarks
from faser_trtllm.commands.options import numbers

EXAMPLES = (
    "Examples: faser bench gpu --output_dir gpu_results; faser bench gpu --output_dir gpu_results "
    "--sections environment,kernels; without a GPU: --dry_run"
)


def gpu(
    output_dir: Annotated[
        Path, typer.Option("--output_dir", help="where gpu.json, gpu.md, gpu.png and the cost tables go")
    ],
    checkpoint_dir: Annotated[
        Path, typer.Option("--checkpoint_dir", help="target checkpoint, which is enlarged to the shapes of --forms")
    ] = Path("engines/demo/target"),
    draft_checkpoint_dir: Annotated[Path, typer.Option("--draft_checkpoint_dir", help="draft checkpoint")] = Path(
        "engines/demo/draft"
    ),
    sections: Annotated[
        str, typer.Option("--sections", help="sections to run, separated by commas; default: all")
    ] = "",
    forms: Annotated[str, typer.Option("--forms", help="shapes of the target, in the order of measuring")] = (
        "8B-128k,8B,1B,32B"
    ),
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="requests in flight for the policies, in the order of measuring")
    ] = "16,64,1,256,4,128,8,32,2",
    minutes: Annotated[
        float, typer.Option("--minutes", help="time for everything; sections that do not fit are left out")
    ] = 25.0,
    dry_run: Annotated[
        bool, typer.Option("--dry_run", help="run tiny shapes on the CPU, to see that everything works")
    ] = False,
) -> None:
    """Test and measure kernels, engines and policies on an NVIDIA GPU.

    Results are written as they come, so those of a run that was cut short are kept. The report begins with what failed;
    the exit code is 1 if anything did.
    """
    use_benchmarks()
    from benchmarks.gpu.options import GpuBenchOptions
    from benchmarks.gpu.report.failures import failures
    from benchmarks.gpu.runner import run_gpu_bench

    options = GpuBenchOptions(
        checkpoint_dir=checkpoint_dir,
        draft_checkpoint_dir=draft_checkpoint_dir,
        output_dir=output_dir,
        sections=tuple(name.strip() for name in sections.split(",") if name.strip()),
        forms=tuple(name.strip() for name in forms.split(",") if name.strip()),
        concurrency=numbers("concurrency", concurrency),
        minutes=minutes,
        dry_run=dry_run,
        command_line=tuple(sys.argv),
    )
    report = run_gpu_bench(options, lambda line: print(line, file=sys.stderr, flush=True))
    print((output_dir / "gpu.md").read_text())
    if failures(report):
        raise typer.Exit(1)
