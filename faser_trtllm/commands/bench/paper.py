"""`faser bench paper`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.checkout import use_benchmarks

EXAMPLES = "Example: faser bench paper --output_dir paper_results --sections ablation,adaptive"


def paper(
    output_dir: Annotated[Path, typer.Option("--output_dir", help="where paper.json, paper.md and plots go")],
    sections: Annotated[
        str, typer.Option("--sections", help="baselines, sharing, ablation, adaptive, context, static, overlap")
    ] = "baselines,sharing,ablation,adaptive,context,static,overlap",
    minutes: Annotated[float, typer.Option("--minutes", help="no setting is begun after so many")] = 55.0,
) -> None:
    """Simulate the FASER paper's ablation on modelled GPUs.

    Its open questions too; the real scheduler and policies run on modelled times.
    """
    use_benchmarks()
    from benchmarks.paper.runner import TEXT_FILE, run_paper_bench

    names = [name for name in sections.split(",") if name]
    run_paper_bench(output_dir, names, minutes, sys.argv, lambda line: print(line, file=sys.stderr, flush=True))
    print((output_dir / TEXT_FILE).read_text())
