"""`faser bench peers`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.checkout import use_benchmarks
from faser_trtllm.commands.options import numbers
from faser_trtllm.errors import FaserError

EXAMPLES = (
    "Example: faser bench peers --checkpoint_dir engines/demo/target --draft_checkpoint_dir engines/demo/draft "
    "--output_dir bench_results --quick"
)


def peers(
    checkpoint_dir: Annotated[Path, typer.Option("--checkpoint_dir", help="target checkpoint")],
    draft_checkpoint_dir: Annotated[Path, typer.Option("--draft_checkpoint_dir", help="draft checkpoint")],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="where bench.json, bench.md and bench.png go")],
    expand: Annotated[str, typer.Option("--expand", help="sizes of the target, as multiples of its layers")] = "1,4",
    batch_sizes: Annotated[str, typer.Option("--batch_sizes", help="requests decoded at the same time")] = "1,4,8",
    rounds: Annotated[int, typer.Option("--rounds", help="rounds to measure; medians are reported")] = 5,
    peer_names: Annotated[
        str, typer.Option("--peers", help="transformers, llama.cpp, openvino, several with commas, or none")
    ] = "transformers,llama.cpp,openvino",
    transformers_python: Annotated[
        Path | None, typer.Option("--transformers_python", help="Python that has transformers installed")
    ] = None,
    llama_python: Annotated[
        Path | None, typer.Option("--llama_python", help="Python that has llama-cpp-python installed")
    ] = None,
    openvino_python: Annotated[
        Path | None,
        typer.Option("--openvino_python", help="Python that has openvino-genai and optimum-intel"),
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option("--num_threads", help="threads of every system; default: all cores")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a short run for a first look; its numbers are too noisy to quote")
    ] = False,
) -> None:
    """Compare speculation with peers that run the same weights.

    Ours runs with speculation off and with fixed:1 to fixed:8.
    """
    use_benchmarks()
    from benchmarks.peers.options import BenchOptions
    from benchmarks.peers.runner import run_bench

    options = BenchOptions(
        checkpoint_dir=checkpoint_dir,
        draft_checkpoint_dir=draft_checkpoint_dir,
        output_dir=output_dir,
        expand=numbers("expand", expand),
        batch_sizes=numbers("batch_sizes", batch_sizes),
        rounds=rounds,
        peers=() if peer_names == "none" else tuple(peer_names.split(",")),
        transformers_python=transformers_python,
        llama_python=llama_python,
        openvino_python=openvino_python,
        num_threads=num_threads,
        command_line=tuple(sys.argv),
    )
    report = run_bench(options.quick() if quick else options, lambda line: print(line, file=sys.stderr, flush=True))
    print((output_dir / "bench.md").read_text())
    if not report.is_exact:
        raise FaserError("speculation changed the tokens of a run; this is a bug, please report it")
