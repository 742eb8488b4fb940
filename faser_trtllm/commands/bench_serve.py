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
    output_dir: Annotated[Path, typer.Option("--output_dir", help="gets serve.json and serve.md")],
    url: Annotated[
        str | None, typer.Option("--url", help="gRPC address of a running service; default: one is started")
    ] = None,
    speculation: Annotated[str | None, typer.Option("--speculation", help=SPELLINGS)] = None,
    stream_interval: Annotated[
        int, typer.Option("--stream_interval", help="of the service: steps of a request between two of its responses")
    ] = 1,
    arrivals: Annotated[str, typer.Option("--arrivals", help="poisson, gamma, bursts or trace")] = "poisson",
    request_rate: Annotated[float, typer.Option("--request_rate", help="requests per second, in the mean")] = 4.0,
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="of gamma: 1 is Poisson, less comes in bunches")
    ] = 0.25,
    peak_ratio: Annotated[float, typer.Option("--peak_ratio", help="of bursts: highest rate over the lowest")] = 8.0,
    period_s: Annotated[float, typer.Option("--period_s", help="of bursts: seconds of a high and a low half")] = 10.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="CSV with arrival_s, num_input_tokens, num_output_tokens, or an Azure LLM inference trace"
        ),
    ] = None,
    time_scale: Annotated[float, typer.Option("--time_scale", help="of a trace: its gaps are multiplied by it")] = 1.0,
    num_requests: Annotated[int, typer.Option("--num_requests")] = 200,
    prompt_len: Annotated[int, typer.Option("--prompt_len", help="tokens, where the trace does not say")] = 64,
    max_tokens: Annotated[int, typer.Option("--max_tokens", help="of output, where the trace does not say")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy")] = 0.0,
    cancel_share: Annotated[float, typer.Option("--cancel_share", help="of requests that the client cancels")] = 0.0,
    timeout_s: Annotated[float, typer.Option("--timeout_s", help="a request that takes longer has failed")] = 600.0,
    ttft_ms: Annotated[float | None, typer.Option("--ttft_ms", help="objective, for goodput")] = None,
    tpot_ms: Annotated[float | None, typer.Option("--tpot_ms", help="objective, for goodput")] = None,
    e2e_ms: Annotated[float | None, typer.Option("--e2e_ms", help="objective, for goodput")] = None,
    in_process: Annotated[
        bool, typer.Option("--in_process", help="compare the service with the executor in process, by turns")
    ] = False,
    concurrency: Annotated[int, typer.Option("--concurrency", help="with --in_process: streams")] = 32,
    rounds: Annotated[int, typer.Option("--rounds", help="with --in_process: measured rounds")] = 5,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="a short run that shows the same; not to be quoted")] = False,
) -> None:
    """Load on the gRPC service in an open loop: latencies, throughput, goodput."""
    from faser_trtllm.bench.serve.options import Objectives, ServeBenchOptions
    from faser_trtllm.bench.serve.runner import run_serve_bench

    options = ServeBenchOptions(
        engine_dir=engine_dir,
        output_dir=output_dir,
        url=url,
        speculation=speculation,
        stream_interval=stream_interval,
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
