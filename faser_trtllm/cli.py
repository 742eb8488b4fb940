"""The `faser` command: build, profile, generate, serve, check, bench. Flags are spelled as trtllm-build's.

Exit code 0 on success, 2 for bad input (one sentence on stderr, with the fix), 1 if something broke.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm import __version__
from faser_trtllm.commands.bench_gpu import EXAMPLES as BENCH_GPU_EXAMPLES
from faser_trtllm.commands.bench_gpu import gpu
from faser_trtllm.commands.bench_serve import EXAMPLES as BENCH_SERVE_EXAMPLES
from faser_trtllm.commands.bench_serve import serve as bench_serve
from faser_trtllm.commands.bench_soak import EXAMPLES as BENCH_SOAK_EXAMPLES
from faser_trtllm.commands.bench_soak import soak
from faser_trtllm.commands.build import EXAMPLES as BUILD_EXAMPLES
from faser_trtllm.commands.build import build
from faser_trtllm.commands.convert import EXAMPLES as CONVERT_EXAMPLES
from faser_trtllm.commands.convert import convert
from faser_trtllm.commands.generate import EXAMPLES as GENERATE_EXAMPLES
from faser_trtllm.commands.generate import generate
from faser_trtllm.commands.openai import EXAMPLES as OPENAI_EXAMPLES
from faser_trtllm.commands.openai import openai
from faser_trtllm.commands.options import FOREIGN_FLAGS, EngineDirOption, numbers
from faser_trtllm.commands.progress import ProgressBar
from faser_trtllm.commands.serve import EXAMPLES as SERVE_EXAMPLES
from faser_trtllm.commands.serve import serve
from faser_trtllm.commands.top import EXAMPLES as TOP_EXAMPLES
from faser_trtllm.commands.top import top
from faser_trtllm.errors import FaserError, InvalidArgumentError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speculative decoding managed at the grain of one row of one request.",
)

app.command(epilog=BUILD_EXAMPLES, context_settings=FOREIGN_FLAGS)(build)
app.command(epilog=CONVERT_EXAMPLES)(convert)
app.command(epilog=GENERATE_EXAMPLES)(generate)
app.command(epilog=OPENAI_EXAMPLES)(openai)
app.command(epilog=SERVE_EXAMPLES, context_settings=FOREIGN_FLAGS)(serve)
app.command(epilog=TOP_EXAMPLES)(top)


@app.command(epilog="Examples: faser check --engine_dir engines/built/demo; faser check --trtllm")
def check(
    engine_dir: Annotated[
        Path | None, typer.Option("--engine_dir", help="a directory that `faser build` wrote")
    ] = None,
    trtllm: Annotated[
        bool,
        typer.Option("--trtllm", help="compare the installed TensorRT-LLM with what our adapters were written for"),
    ] = False,
) -> None:
    """Check an engine directory: every hash, both engines opened, a few tokens generated with and without drafts."""
    from faser_trtllm.serving.check import check_engine_dir

    if trtllm:
        from faser_trtllm.commands.check_trtllm import check_tensorrt_llm

        code = check_tensorrt_llm()
        if code or engine_dir is None:
            raise typer.Exit(code)
    if engine_dir is None:
        raise InvalidArgumentError("there is nothing to check; give --engine_dir, or --trtllm for TensorRT-LLM")
    for line in check_engine_dir(engine_dir):
        print(line, flush=True)


@app.command(epilog="Example: faser profile --engine_dir engines/built/demo")
def profile(
    engine_dir: EngineDirOption,
    quick: Annotated[bool, typer.Option("--quick", help="a few seconds, no calibration of pruning")] = False,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt_file", help="one prompt per line, to calibrate pruning on")
    ] = None,
    num_threads: Annotated[int | None, typer.Option("--num_threads", help="default: all cores")] = None,
) -> None:
    """Measure what drafting and verification cost on this machine; writes profile.json beside the engines."""
    from faser_trtllm.profiling.options import ProfileOptions
    from faser_trtllm.profiling.profile import profile_engine_dir

    options = ProfileOptions(engine_dir, quick=quick, prompt_file=prompt_file, num_threads=num_threads)
    with ProgressBar() as progress:
        report = profile_engine_dir(options, progress)
    for kind, error in sorted(report.table.error.items()):
        print(f"{kind}: {100 * error:.1f} % mean error on held-out points")
    print(f"measured in {report.seconds:.0f} s: {engine_dir / 'profile.json'}")


bench_app = typer.Typer(help="Measurements: against peers, and of policies against each other.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
bench_app.command("gpu", epilog=BENCH_GPU_EXAMPLES)(gpu)
bench_app.command("serve", epilog=BENCH_SERVE_EXAMPLES)(bench_serve)
bench_app.command("soak", epilog=BENCH_SOAK_EXAMPLES)(soak)


@bench_app.command(
    epilog="Example: faser bench peers --checkpoint_dir engines/demo/target --draft_checkpoint_dir engines/demo/draft "
    "--output_dir bench_results --quick"
)
def peers(
    checkpoint_dir: Annotated[Path, typer.Option("--checkpoint_dir", help="target checkpoint")],
    draft_checkpoint_dir: Annotated[Path, typer.Option("--draft_checkpoint_dir", help="draft checkpoint")],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="gets bench.json, bench.md and bench.png")],
    expand: Annotated[str, typer.Option("--expand", help="forms of the target, as multiples of its layers")] = "1,4",
    batch_sizes: Annotated[str, typer.Option("--batch_sizes")] = "1,4,8",
    rounds: Annotated[int, typer.Option("--rounds", help="measured rounds; medians are reported")] = 5,
    peer_names: Annotated[
        str, typer.Option("--peers", help="transformers,llama.cpp or none")
    ] = "transformers,llama.cpp",
    transformers_python: Annotated[
        Path | None, typer.Option("--transformers_python", help="interpreter that has transformers")
    ] = None,
    llama_python: Annotated[Path | None, typer.Option("--llama_python", help="interpreter that has llama_cpp")] = None,
    num_threads: Annotated[
        int | None, typer.Option("--num_threads", help="of every system; default: all cores")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a short run that shows the same; not to be quoted")] = False,
) -> None:
    """Compare speculation off and fixed:1..8 with each other and with peers that run the same weights."""
    from faser_trtllm.bench.options import BenchOptions
    from faser_trtllm.bench.runner import run_bench

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
        num_threads=num_threads,
        command_line=tuple(sys.argv),
    )
    report = run_bench(options.quick() if quick else options, lambda line: print(line, file=sys.stderr, flush=True))
    print((output_dir / "bench.md").read_text())
    if not report.is_exact:
        raise FaserError("speculation changed the tokens of a run; this is a bug, please report it")


@bench_app.command(
    epilog="Example: faser bench policies --checkpoint_dir engines/demo/target "
    "--draft_checkpoint_dir engines/demo/draft --output_dir bench_results --quick"
)
def policies(
    checkpoint_dir: Annotated[Path, typer.Option("--checkpoint_dir", help="target checkpoint")],
    draft_checkpoint_dir: Annotated[Path, typer.Option("--draft_checkpoint_dir", help="draft checkpoint")],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="gets policies.json, policies.md and plots")],
    expand: Annotated[str, typer.Option("--expand", help="forms of the target, as multiples of its layers")] = "1,4",
    concurrency: Annotated[str, typer.Option("--concurrency")] = "1,2,4,8,16,32",
    fixed: Annotated[str, typer.Option("--fixed", help="lengths of the fixed policies")] = "1,2,3,4,5,6,7,8",
    systems: Annotated[
        str | None, typer.Option("--policies", help="beside off and fixed, by their labels in the report; default: all")
    ] = None,
    bursty: Annotated[bool, typer.Option("--bursty/--no-bursty", help="the trace whose load swings 35x")] = True,
    minutes: Annotated[float, typer.Option("--minutes", help="of measuring; what fits is reported")] = 20.0,
    num_threads: Annotated[int | None, typer.Option("--num_threads", help="default: all cores")] = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="take times from the cost tables, tokens from the engines")
    ] = False,
    cost_table: Annotated[
        Path | None, typer.Option("--cost_table", help="a profile.json, to simulate the machine it was measured on")
    ] = None,
    mood: Annotated[
        float, typer.Option("--mood", help="a simulated machine is up to so many times slower for a while")
    ] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="a short run that shows the same; not to be quoted")] = False,
) -> None:
    """Compare the policies with each other by load, and with the oracle."""
    from faser_trtllm.bench.policies.options import POLICIES, PolicyBenchOptions
    from faser_trtllm.bench.policies.runner import run_policy_bench

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
        mood=mood,
        command_line=tuple(sys.argv),
    )
    run_policy_bench(options.quick() if quick else options, lambda line: print(line, file=sys.stderr, flush=True))
    print((output_dir / "policies.md").read_text())


@app.command()
def version() -> None:
    """Print the version and the instruction set that the CPU engine uses here."""
    from faser_trtllm.native import isa

    print(f"faser_trtllm {__version__}, CPU engine: {isa()}")


def main() -> None:
    """Entry point: user errors become one sentence and exit code 2."""
    try:
        app()
    except FaserError as error:
        print(f"faser: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
