"""`faser bench serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.options import EngineDirOption
from faser_trtllm.config import SPELLINGS
from faser_trtllm.errors import FaserError

EXAMPLES = (
    "Examples: faser bench serve --engine_dir engines/built/demo-x4 --output_dir bench_results --request_rate 8 "
    "--ttft_ms 300 --tpot_ms 30; with --url localhost:8001 against a running service; with --in_process for what "
    "serving costs"
)


def serve(
    engine_dir: EngineDirOption,
    output_dir: Annotated[Path, typer.Option("--output_dir", help="where serve.json and serve.md go")],
    url: Annotated[
        str | None, typer.Option("--url", help="gRPC address of a running service; default: one is started")
    ] = None,
    speculation: Annotated[str | None, typer.Option("--speculation", help=SPELLINGS)] = None,
    stream_interval: Annotated[
        str,
        typer.Option(
            "--stream_interval",
            help="stream_interval of the service: steps between two responses of a request, or auto",
        ),
    ] = "auto",
    arrivals: Annotated[str, typer.Option("--arrivals", help="poisson, gamma, bursts or trace")] = "poisson",
    request_rate: Annotated[float, typer.Option("--request_rate", help="mean requests per second")] = 4.0,
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="for gamma: 1 is Poisson, a smaller value comes in bunches")
    ] = 0.25,
    peak_ratio: Annotated[
        float, typer.Option("--peak_ratio", help="for bursts: the highest rate over the lowest")
    ] = 8.0,
    period_s: Annotated[
        float, typer.Option("--period_s", help="for bursts: seconds of a high and a low half together")
    ] = 10.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="CSV with arrival_s, num_input_tokens, num_output_tokens, or an Azure LLM inference trace"
        ),
    ] = None,
    time_scale: Annotated[
        float, typer.Option("--time_scale", help="for a trace: factor on the gaps between requests")
    ] = 1.0,
    num_requests: Annotated[int, typer.Option("--num_requests", help="requests to send")] = 200,
    prompt_len: Annotated[
        int, typer.Option("--prompt_len", help="tokens of a prompt, where no trace says otherwise")
    ] = 64,
    max_tokens: Annotated[
        int, typer.Option("--max_tokens", help="tokens of an answer, where no trace says otherwise")
    ] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy")] = 0.0,
    cancel_share: Annotated[
        float, typer.Option("--cancel_share", help="share of requests that the client cancels")
    ] = 0.0,
    timeout_s: Annotated[
        float, typer.Option("--timeout_s", help="seconds after which a request counts as failed")
    ] = 600.0,
    ttft_ms: Annotated[
        float | None, typer.Option("--ttft_ms", help="objective for the time to the first token")
    ] = None,
    tpot_ms: Annotated[float | None, typer.Option("--tpot_ms", help="objective for the time per output token")] = None,
    e2e_ms: Annotated[float | None, typer.Option("--e2e_ms", help="objective for the whole request")] = None,
    in_process: Annotated[
        bool, typer.Option("--in_process", help="compare the service with the executor in this process, in turn")
    ] = False,
    concurrency: Annotated[int, typer.Option("--concurrency", help="for --in_process: number of streams")] = 32,
    rounds: Annotated[int, typer.Option("--rounds", help="for --in_process: rounds to measure")] = 5,
    seed: Annotated[int, typer.Option("--seed", help="of arrivals and prompts")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="a short run for a first look; its numbers are too noisy to quote")
    ] = False,
) -> None:
    """Measure latency, throughput and goodput of the gRPC service.

    Requests arrive by themselves (an open loop), whether or not earlier ones have been answered.
    """
    from faser_trtllm.bench.serve.options import Objectives, ServeBenchOptions
    from faser_trtllm.bench.serve.runner import run_serve_bench

    options = ServeBenchOptions(
        engine_dir=engine_dir,
        output_dir=output_dir,
        url=url,
        speculation=speculation,
        stream_interval=int(stream_interval) if stream_interval.isdecimal() else stream_interval,
        arrivals="trace" if trace is not None and arrivals == "poisson" else arrivals,
        request_rate=request_rate,
        burstiness=burstiness,
        peak_ratio=peak_ratio,
        period_s=period_s,
        trace=trace,
        time_scale=time_scale,
        num_requests=num_requests,
        prompt_len=prompt_len,
        max_tokens=max_tokens,
        temperature=temperature,
        cancel_share=cancel_share,
        timeout_s=timeout_s,
        objectives=Objectives(ttft_ms, tpot_ms, e2e_ms),
        in_process=in_process,
        concurrency=concurrency,
        rounds=rounds,
        seed=seed,
        command_line=tuple(sys.argv),
    )
    report = run_serve_bench(
        options.quick() if quick else options, lambda line: print(line, file=sys.stderr, flush=True)
    )
    print((output_dir / "serve.md").read_text())
    if report.overhead is not None and report.overhead.num_different:
        raise FaserError("the service and the executor gave different tokens; this is a bug, please report it")
