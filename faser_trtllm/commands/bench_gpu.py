"""`faser bench gpu`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.options import numbers

EXAMPLES = (
    "Examples: faser bench gpu --output_dir gpu_results; faser bench gpu --output_dir gpu_results "
    "--sections environment,kernels; without a GPU: --dry_run"
)


def gpu(
    output_dir: Annotated[Path, typer.Option("--output_dir", help="gets gpu.json, gpu.md, gpu.png, cost tables")],
    checkpoint_dir: Annotated[
        Path, typer.Option("--checkpoint_dir", help="trained target, enlarged to the forms")
    ] = Path("engines/demo/target"),
    draft_checkpoint_dir: Annotated[Path, typer.Option("--draft_checkpoint_dir")] = Path("engines/demo/draft"),
    sections: Annotated[str, typer.Option("--sections", help="names separated by commas; default: all")] = "",
    forms: Annotated[str, typer.Option("--forms", help="shapes of the target, the first is measured first")] = (
        "8B,1B,32B"
    ),
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="of the policies, in the order of measuring")
    ] = "1,16,64,4,256,8,32,2,128",
    minutes: Annotated[float, typer.Option("--minutes", help="of everything together")] = 9.0,
    dry_run: Annotated[
        bool, typer.Option("--dry_run", help="tiny shapes on the CPU, to see that everything runs")
    ] = False,
) -> None:
    """Measure kernels, passes, partitions, exactness and policies on an NVIDIA GPU. Partial results are kept."""
    from faser_trtllm.bench.gpu.options import GpuBenchOptions
    from faser_trtllm.bench.gpu.runner import run_gpu_bench

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
    run_gpu_bench(options, lambda line: print(line, file=sys.stderr, flush=True))
    print((output_dir / "gpu.md").read_text())
