"""`faser bench host`: interleaved rounds of all systems and sizes, with results written after each round."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from benchmarks.common.environment import CpuMeter, describe_environment
from benchmarks.host.host_step import measure_reference, measure_step
from benchmarks.host.markdown import render_markdown
from benchmarks.host.options import REFERENCE_DRAFTS, HostBenchOptions
from benchmarks.host.plot import write_plot
from benchmarks.host.report import HostBenchReport, HostStep
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.errors import install
from lab.costmodel.gpu import find_gpu
from lab.costmodel.pair import Pair
from lab.costmodel.shape import find_shape
from lab.costmodel.table import modeled_table

GPU, TARGET, DRAFT = "h100", "llama-3.1-8b", "llama-3.2-1b"
JSON_FILE, TEXT_FILE, PLOT_FILE = "host.json", "host.md", "host.png"
REFERENCE_STEPS = 4  # factor over the host's steps


def run_host_bench(options: HostBenchOptions, say: Callable[[str], None] = lambda line: None) -> HostBenchReport:
    """Measure, and write host.json, host.md and (with matplotlib) host.png into options.output_dir."""
    options.check()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    costs = modeled_costs(max(options.num_requests))
    environment = describe_environment(options.command_line)
    meter = CpuMeter()
    steps: list[HostStep] = []
    for number in range(options.num_rounds):
        for num_requests in options.num_requests:
            reference_us = measure_reference(num_requests, REFERENCE_DRAFTS, REFERENCE_STEPS * options.num_steps)
            for system in options.systems:
                costs_us = measure_step(
                    system,
                    num_requests,
                    costs,
                    num_steps=options.num_steps,
                    acceptance=options.acceptance,
                    max_draft_len=options.max_draft_len,
                    seed=number,
                    engines=options.engines,
                )
                steps.append(HostStep(system, num_requests, number, reference_us, *costs_us))
        costs_of = f"{TARGET} + {DRAFT} on {GPU}"
        report = HostBenchReport(environment | meter.shares(), costs_of, steps, options.engines)
        (options.output_dir / JSON_FILE).write_text(json.dumps(report.to_json(), indent=1) + "\n")
        (options.output_dir / TEXT_FILE).write_text(render_markdown(report))
        say(f"round {number + 1} of {options.num_rounds}")
    if not write_plot(report, options.output_dir / PLOT_FILE):
        say(f"no plot, matplotlib is missing: {install('bench')}")
    return report


def modeled_costs(num_requests: int) -> CostTable:
    """Return modeled costs for price and its clock, without overlap, since both threads would share one stopwatch."""
    pair = Pair(find_gpu(GPU), find_shape(TARGET), find_shape(DRAFT))
    return replace(modeled_table(pair, max_batch_size=max(64, num_requests)), interference=())
