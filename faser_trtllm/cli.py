"""The `faser` command: build, profile, generate, serve, check, bench. Flags are spelled as trtllm-build's.

Exit code 0 on success, 2 for bad input (one sentence on stderr, with the fix), 1 if something broke.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from faser_trtllm import __version__
from faser_trtllm.config import DEFAULT_SPECULATION, SPELLINGS, ExecutorConfig, parse
from faser_trtllm.errors import FaserError, InvalidArgumentError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Speculative decoding managed at the grain of one row of one request.",
)

EngineDirOption = Annotated[Path, typer.Option("--engine_dir", help="a directory that `faser build` wrote")]


@app.command(
    epilog="Example: faser build --checkpoint_dir engines/demo/target --draft_checkpoint_dir engines/demo/draft "
    "--output_dir engines/built/demo"
)
def build(
    checkpoint_dir: Annotated[Path, typer.Option("--checkpoint_dir", help="target checkpoint, Hugging Face format")],
    output_dir: Annotated[Path, typer.Option("--output_dir", help="where the engines go")],
    draft_checkpoint_dir: Annotated[
        Path | None, typer.Option("--draft_checkpoint_dir", help="draft checkpoint with the same tokenizer")
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="cpu")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16")] = "bfloat16",
    max_batch_size: Annotated[int, typer.Option("--max_batch_size", help="requests in one pass")] = 32,
    max_num_tokens: Annotated[int, typer.Option("--max_num_tokens", help="rows in one pass")] = 2048,
    max_seq_len: Annotated[
        int | None, typer.Option("--max_seq_len", help="prompt and output; default: the model's, at most 4096")
    ] = None,
    max_draft_len: Annotated[int, typer.Option("--max_draft_len", help="pending drafts per request")] = 8,
    tokens_per_block: Annotated[int, typer.Option("--tokens_per_block", help="a multiple of 16")] = 32,
    exit_layers: Annotated[
        str, typer.Option("--exit_layers", help="layer boundaries where rows may be pruned, as 2,4")
    ] = "",
    expand: Annotated[
        int, typer.Option("--expand", help="N times the target's layers with the same function: a cost knob")
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry_run", help="check everything, write nothing")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace whatever is in output_dir")] = False,
) -> None:
    """Compile a target and a draft checkpoint into engines."""
    from faser_trtllm.builder.build import BuildOptions, build_engines

    options = BuildOptions(
        checkpoint_dir=checkpoint_dir,
        draft_checkpoint_dir=draft_checkpoint_dir,
        output_dir=output_dir,
        backend=backend,
        dtype=dtype,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        max_draft_len=max_draft_len,
        tokens_per_block=tokens_per_block,
        exit_layers=_numbers("exit_layers", exit_layers),
        expand=expand,
        dry_run=dry_run,
        force=force,
    )
    with _progress_bar() as progress:
        build_engines(options, progress)
    print(f"{'checked' if dry_run else 'built'} {output_dir}", file=sys.stderr)


@app.command(
    epilog='Example: faser generate --engine_dir engines/built/demo --prompt "def fibonacci(n):" --max_tokens 64 --json'
)
def generate(
    engine_dir: EngineDirOption,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", help="may be given several times")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt_file", help="one prompt per line; JSON strings if the line starts with a quote"),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max_tokens")] = 64,
    min_tokens: Annotated[int, typer.Option("--min_tokens")] = 0,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy")] = None,
    top_k: Annotated[int | None, typer.Option("--top_k")] = None,
    top_p: Annotated[float | None, typer.Option("--top_p")] = None,
    min_p: Annotated[float | None, typer.Option("--min_p")] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    repetition_penalty: Annotated[float, typer.Option("--repetition_penalty")] = 1.0,
    stop_words: Annotated[list[str] | None, typer.Option("--stop_words", help="may be given several times")] = None,
    speculation: Annotated[str, typer.Option("--speculation", help=SPELLINGS)] = DEFAULT_SPECULATION,
    num_draft_tokens: Annotated[int | None, typer.Option("--num_draft_tokens", help="0 turns speculation off")] = None,
    num_threads: Annotated[int | None, typer.Option("--num_threads", help="default: all cores")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="write a Chrome/Perfetto trace of the steps")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per prompt")] = False,
) -> None:
    """Generate text in process, without a server; prompts run as one batch."""
    from faser_trtllm.executor.factory import open_executor
    from faser_trtllm.serving.offline import generate_all

    prompts = _prompts(prompt, prompt_file)
    config = parse(
        ExecutorConfig, {"speculation": speculation, "num_threads": num_threads, "trace_file": trace and str(trace)}
    )
    fields = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "stop_words": tuple(stop_words or ()),
        "num_draft_tokens": num_draft_tokens,
    }
    with open_executor(engine_dir, config) as executor:
        for completion in generate_all(executor, engine_dir, prompts, fields):
            print(json.dumps(completion.as_dict()) if as_json else completion.text, flush=True)


@app.command(epilog="Example: faser serve --engine_dir engines/built/demo --http_port 8000 --grpc_port 8001")
def serve(
    engine_dir: Annotated[Path | None, typer.Option("--engine_dir", help="default: engine_dir of --config")] = None,
    http_port: Annotated[int, typer.Option("--http_port")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc_port")] = 8001,
    metrics_port: Annotated[int, typer.Option("--metrics_port")] = 8002,
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1",
    config: Annotated[Path | None, typer.Option("--config", help="faser.yaml")] = None,
    model_repo: Annotated[Path | None, typer.Option("--model_repo", help="default: the one that ships")] = None,
    speculation: Annotated[str | None, typer.Option("--speculation", help=SPELLINGS)] = None,
) -> None:
    """Serve engines behind NVIDIA Triton: wait until ready, drain on SIGTERM."""
    from faser_trtllm.serving.launcher import ServeOptions
    from faser_trtllm.serving.launcher import serve as run

    code = run(
        ServeOptions(
            engine_dir=engine_dir,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            host=host,
            config=config,
            model_repo=model_repo,
            speculation=speculation,
        )
    )
    raise typer.Exit(code)


@app.command(epilog="Example: faser check --engine_dir engines/built/demo")
def check(engine_dir: EngineDirOption) -> None:
    """Check an engine directory: every hash, both engines opened, a few tokens generated with and without drafts."""
    from faser_trtllm.serving.check import check_engine_dir

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
    with _progress_bar() as progress:
        report = profile_engine_dir(options, progress)
    for kind, error in sorted(report.table.error.items()):
        print(f"{kind}: {100 * error:.1f} % mean error on held-out points")
    print(f"measured in {report.seconds:.0f} s: {engine_dir / 'profile.json'}")


bench_app = typer.Typer(help="Measurements: against peers, and of policies against each other.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


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
        expand=_numbers("expand", expand),
        batch_sizes=_numbers("batch_sizes", batch_sizes),
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
    bursty: Annotated[bool, typer.Option("--bursty/--no-bursty", help="the trace whose load swings 35x")] = True,
    minutes: Annotated[float, typer.Option("--minutes", help="of measuring; what fits is reported")] = 20.0,
    num_threads: Annotated[int | None, typer.Option("--num_threads", help="default: all cores")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a short run that shows the same; not to be quoted")] = False,
) -> None:
    """Compare the policies with each other by load, and with the oracle."""
    from faser_trtllm.bench.policies.options import PolicyBenchOptions
    from faser_trtllm.bench.policies.runner import run_policy_bench

    options = PolicyBenchOptions(
        checkpoint_dir=checkpoint_dir,
        draft_checkpoint_dir=draft_checkpoint_dir,
        output_dir=output_dir,
        expand=_numbers("expand", expand),
        concurrency=_numbers("concurrency", concurrency),
        bursty=bursty,
        minutes=minutes,
        num_threads=num_threads,
        command_line=tuple(sys.argv),
    )
    run_policy_bench(options.quick() if quick else options, lambda line: print(line, file=sys.stderr, flush=True))
    print((output_dir / "policies.md").read_text())


@app.command()
def version() -> None:
    """Print the version and the instruction set that the CPU engine uses here."""
    from faser_trtllm.native import isa

    print(f"faser_trtllm {__version__}, CPU engine: {isa()}")


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise InvalidArgumentError(f"{name} is {text!r}, it must be whole numbers as in 2,4") from None


def _prompts(prompt: list[str] | None, prompt_file: Path | None) -> list[str]:
    if (prompt is None) == (prompt_file is None):
        raise InvalidArgumentError("give either --prompt or --prompt_file")
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    try:
        lines = prompt_file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"prompt_file {prompt_file.name} cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.startswith('"'):
            try:
                prompts.append(str(json.loads(line)))
            except json.JSONDecodeError as error:
                raise InvalidArgumentError(f"prompt_file line {number} is not a JSON string: {error}") from None
        else:
            prompts.append(line)
    if not prompts:
        raise InvalidArgumentError(f"prompt_file {prompt_file.name} holds no prompt")
    return prompts


class _progress_bar:  # noqa: N801
    """A rich bar on a terminal, nothing elsewhere."""

    def __enter__(self) -> Callable[[str, int, int], None]:
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._tasks: dict[str, Any] = {}
        return self._update

    def _update(self, what: str, done: int, total: int) -> None:
        if self._bar is not None:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(what, total=total)
            self._bar.update(self._tasks[what], completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


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
