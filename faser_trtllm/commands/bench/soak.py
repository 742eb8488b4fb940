"""`faser bench soak`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from faser_trtllm.commands.checkout import use_benchmarks
from faser_trtllm.commands.options import EngineDirOption
from faser_trtllm.config import SPELLINGS

EXAMPLES = (
    "Examples: faser bench soak --engine_dir engines/built/demo --minutes 20 --output_dir bench_results; against a "
    "running service with --url localhost:8001 --http_url http://localhost:8000 --metrics_url "
    "http://localhost:8002/metrics, and with --launcher_pid its processes are watched and its engine child is killed"
)


def soak(
    engine_dir: EngineDirOption,
    output_dir: Annotated[
        Path, typer.Option("--output_dir", help="where soak.json, soak.md, soak.png and server.log go")
    ],
    minutes: Annotated[float, typer.Option("--minutes", help="time of load after the warm-up")] = 20.0,
    url: Annotated[
        str | None, typer.Option("--url", help="gRPC address of a running service; default: one is started")
    ] = None,
    http_url: Annotated[str | None, typer.Option("--http_url", help="HTTP address of the service at --url")] = None,
    metrics_url: Annotated[
        str | None, typer.Option("--metrics_url", help="metrics address of the service at --url")
    ] = None,
    launcher_pid: Annotated[
        int | None,
        typer.Option("--launcher_pid", help="process id of the `faser serve` behind --url, if it is on this machine"),
    ] = None,
    models: Annotated[
        str | None, typer.Option("--models", help="models to load; default: all of the repository")
    ] = None,
    speculation: Annotated[str | None, typer.Option("--speculation", help=SPELLINGS)] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="requests in flight; default: 1.5 times max_batch_size")
    ] = None,
    http_share: Annotated[float, typer.Option("--http_share", help="share of requests that come over HTTP")] = 0.15,
    cancel_share: Annotated[
        float, typer.Option("--cancel_share", help="share of requests that the client cancels")
    ] = 0.2,
    bad_share: Annotated[float, typer.Option("--bad_share", help="share of requests that must be refused")] = 0.05,
    late_share: Annotated[float, typer.Option("--late_share", help="share of requests with a short deadline")] = 0.1,
    kill_period_s: Annotated[
        float, typer.Option("--kill_period_s", help="seconds between two kills of the engine process; 0: never")
    ] = 120.0,
    warmup_s: Annotated[float, typer.Option("--warmup_s", help="seconds of load before the baseline")] = 40.0,
    max_growth_mib: Annotated[
        float, typer.Option("--max_growth_mib", help="MiB by which a process may grow over the run")
    ] = 16.0,
    seed: Annotated[int, typer.Option("--seed", help="of the requests")] = 0,
) -> None:
    """Load, cancel, misuse and kill a service, and account for it all.

    The exit code is 1 if a request, memory or a process was lost.
    """
    use_benchmarks()
    from benchmarks.soak.options import SoakOptions
    from benchmarks.soak.runner import run_soak

    options = SoakOptions(
        engine_dir=engine_dir,
        output_dir=output_dir,
        minutes=minutes,
        url=url,
        http_url=http_url,
        metrics_url=metrics_url,
        launcher_pid=launcher_pid,
        models=tuple(models.split(",")) if models else None,
        speculation=speculation,
        concurrency=concurrency,
        http_share=http_share,
        cancel_share=cancel_share,
        bad_share=bad_share,
        late_share=late_share,
        kill_period_s=kill_period_s,
        warmup_s=warmup_s,
        max_growth_mib=max_growth_mib,
        seed=seed,
        command_line=tuple(sys.argv),
    )
    report = run_soak(options, lambda line: print(line, file=sys.stderr, flush=True))
    print((output_dir / "soak.md").read_text())
    if not report.has_passed:
        raise typer.Exit(1)
