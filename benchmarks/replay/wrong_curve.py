"""Simulate the loss of `price` by a wrong cost curve after it had time to correct it.

Time follows measurements on an H100. The curves of the policy's table are too high or too low by a factor, one at a
time. Rates are those in WINDOW_S, relative to the right table's.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.replay.__main__ import parse_outputs
from benchmarks.replay.recording import NUM_OUTPUT, Recording, add_options, open_recording
from benchmarks.replay.simulate import Machine, draw_jobs, open_replay, run_closed_loop
from faser_trtllm.core.cost_curve import CostCurve
from faser_trtllm.core.cost_table import CostTable
from lab.clock import ManualClock
from lab.costmodel.measured import MeasuredGpu
from lab.simulation.synthetic_profile import synthetic_profile

FACTORS = (5.0, 0.2)
WINDOW_S = (30.0, 50.0)  # time in which rates are measured
POLICY = "price:mode=serial,prune=off"
MANY_JOBS = 200_000  # more than end in that time


def scaled(curve: CostCurve, factor: float) -> CostCurve:
    return replace(
        curve,
        ms=tuple(factor * ms for ms in curve.ms),
        per_request_ms=factor * curve.per_request_ms,
        per_row_context_ms=factor * curve.per_row_context_ms,
        per_request_context_ms=factor * curve.per_request_context_ms,
        per_context_ms=factor * curve.per_context_ms,
    )


def wrong(table: CostTable, key: str, factor: float) -> CostTable:
    """Return the table with one curve ("kind@partition") that is wrong by a factor."""
    return replace(table, curves=dict(table.curves) | {key: scaled(table.curves[key], factor)})


def rate(
    recording: Recording,
    gpu: MeasuredGpu,
    believed: CostTable,
    load: int,
    outputs: tuple[int, int],
    window_s: tuple[float, float] = WINDOW_S,
) -> float:
    """Return output tokens per second of `price` with this table."""
    jobs = draw_jobs(recording, MANY_JOBS, 0, outputs)
    clock = ManualClock()
    with open_replay(recording, Machine.of_gpu(gpu, believed), POLICY, load, clock) as executor:
        return run_closed_loop(executor, clock.now_s, jobs, load, 0, window_s)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="faser bench replay.wrong_curve", description=__doc__)
    add_options(parser)
    parser.add_argument("--loads", default="1,16,64,256", help="concurrent requests")
    parser.add_argument(
        "--outputs", type=parse_outputs, default=(NUM_OUTPUT // 2, NUM_OUTPUT), help="tokens: LEAST,MOST"
    )
    given = parser.parse_args(argv)
    recording, gpu = open_recording(given), MeasuredGpu()
    table = synthetic_profile(gpu, noise=0.01)
    loads = [int(load) for load in given.loads.split(",")]
    print(f"SIMULATED. Tokens/s after {WINDOW_S[0]:g} s over those with the right table, by requests in flight\n")
    print(f"| curve | factor | {' | '.join(map(str, loads))} |\n|---|---|{'---|' * len(loads)}")
    right = [rate(recording, gpu, table, load, given.outputs) for load in loads]
    for key, factor in itertools.product(table.curves, FACTORS):
        believed = wrong(table, key, factor)
        rates = [rate(recording, gpu, believed, load, given.outputs) for load in loads]
        shares = [f"{found / base:.3f}" for found, base in zip(rates, right, strict=True)]
        print(f"| {key} | {factor:g} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
