"""Runs `faser bench serve` and writes serve.json and serve.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from faser_trtllm.bench.environment import describe_environment
from faser_trtllm.bench.serve.arrivals import Arrival, gamma, poisson, square_bursts, trace_arrivals
from faser_trtllm.bench.serve.cpu_use import CpuMeter
from faser_trtllm.bench.serve.generator import run_closed, run_open
from faser_trtllm.bench.serve.in_process import InProcess
from faser_trtllm.bench.serve.options import ServeBenchOptions
from faser_trtllm.bench.serve.overhead import compare
from faser_trtllm.bench.serve.report import ServeReport, render_markdown
from faser_trtllm.bench.serve.served import Served
from faser_trtllm.bench.serve.summary import summarize_load
from faser_trtllm.bench.serve.workload import make_workload
from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import ExecutorConfig, parse
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.models.tokenizer import Tokenizer
from faser_trtllm.profiling.ensure import ensure_profile
from faser_trtllm.trtllm.convert.synthetic import FORCED_ACCEPTANCE, with_forced_acceptance

Log = Callable[[str], None]


def run_serve_bench(options: ServeBenchOptions, log: Log) -> ServeReport:
    """Measure, and write output_dir/serve.json and serve.md; raises FaserError."""
    options.validate()
    engines = EngineDir.load(options.engine_dir)
    tokenizer = Tokenizer.load(engines.tokenizer_dir)
    max_seq_len = engines.build_config.max_seq_len
    options.output_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        served = None
        if options.url is None:
            log("starting a service")
            log_file = options.output_dir / "server.log"
            served = stack.enter_context(
                Served(options.engine_dir, options.speculation, log_file, options.stream_interval)
            )
        url = options.url or (served.url if served else "")
        measure = _overhead if options.in_process else _load
        report = measure(options, url, served, tokenizer, max_seq_len, log)
    (options.output_dir / "serve.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    (options.output_dir / "serve.md").write_text(render_markdown(report))
    return report


def draw_arrivals(options: ServeBenchOptions) -> tuple[Arrival, ...]:
    """num_requests arrivals, or fewer from a short trace."""
    count, rate = options.num_requests, options.request_rate
    if options.trace is not None:
        return trace_arrivals(options.trace, count, options.time_scale)
    if options.arrivals == "gamma":
        return gamma(count, rate, options.burstiness, options.seed)
    if options.arrivals == "bursts":
        return square_bursts(count, rate, options.peak_ratio, options.period_s, options.seed)
    return poisson(count, rate, options.seed)


def _load(
    options: ServeBenchOptions, url: str, served: Served | None, tokenizer: Tokenizer, max_seq_len: int, log: Log
) -> ServeReport:
    workload = make_workload(
        tokenizer.encode,
        draw_arrivals(options),
        prompt_len=options.prompt_len,
        max_tokens=options.max_tokens,
        max_seq_len=max_seq_len,
        cancel_share=options.cancel_share,
        seed=options.seed,
    )
    log(f"sending {len(workload.jobs)} requests over {workload.jobs[-1].arrival_s:.1f} s")
    meter = CpuMeter(served.cpu_s if served else None)
    outcomes = run_open(url, workload.jobs, options.temperature, options.timeout_s)
    cpu = meter.use()
    return ServeReport(
        options,
        describe_environment(options.command_line),
        workload.prompt_source,
        workload.num_shortened,
        load=summarize_load(outcomes, sum(len(job.prompt) for job in workload.jobs), options.objectives),
        load_cpu=cpu,
    )


def _overhead(
    options: ServeBenchOptions, url: str, served: Served | None, tokenizer: Tokenizer, max_seq_len: int, log: Log
) -> ServeReport:
    arrivals = [Arrival(0.0)] * (options.concurrency * options.requests_per_stream)
    workloads = [
        make_workload(
            tokenizer.encode,
            arrivals,
            prompt_len=options.prompt_len,
            max_tokens=options.max_tokens,
            max_seq_len=max_seq_len,
            seed=options.seed + number,
        )
        for number in range(options.rounds + 1)
    ]
    config = parse(ExecutorConfig, {"speculation": options.speculation} if options.speculation else {})
    if with_forced_acceptance(config, os.environ).synthetic_acceptance is not None:
        raise ConfigError(f"{FORCED_ACCEPTANCE} is set, but --in_process compares tokens; unset it")
    ensure_profile(options.engine_dir, config)
    with open_executor(options.engine_dir, config) as executor:
        overhead = compare(
            [workload.jobs for workload in workloads],
            options.concurrency,
            InProcess(executor, tokenizer).run_closed,
            partial(run_closed, url, timeout_s=options.timeout_s),
            served.cpu_s if served else None,
            log,
        )
    return ServeReport(
        options,
        describe_environment(options.command_line),
        workloads[0].prompt_source,
        workloads[0].num_shortened,
        overhead=overhead,
    )
