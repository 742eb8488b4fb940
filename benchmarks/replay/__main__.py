"""Simulate price against off, all fixed lengths and schedule, by load.

A table is a cost table's JSON file (a profile.json, or a modeled one), which time and policies both use; or
h100-measured: then time follows measurements on an H100, and policies use a quick profile of it, with new noise in each
round. All policies get the same requests; the rival has the highest mean rate over all rounds of its load. Errors are
standard errors over the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.replay.recording import MAX_DRAFT_LEN, NUM_OUTPUT, Recording, add_options, open_recording
from benchmarks.replay.simulate import OUTPUTS, Machine, simulate
from faser_trtllm.core.cost_table import CostTable
from lab.costmodel.measured import NAMES, MeasuredGpu
from lab.simulation.synthetic_profile import synthetic_profile

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIXED = tuple(f"fixed:{k}" for k in range(1, MAX_DRAFT_LEN + 1))
NEAR = 0.975  # share of the first round's best rival; slower ones do not run in other rounds


def measure(
    recording: Recording,
    machine: Callable[[int], Machine],
    policy: str,
    load: int,
    rounds: int,
    slowdown: float = 1.0,
    outputs: tuple[int, int] = OUTPUTS,
) -> dict[str, list[float]]:
    """Return rates by policy and round; slow rivals have the first round only. machine: returns a round's machine."""
    rivals = ("off", *FIXED, "schedule")

    def rate(spelling: str, seed: int) -> float:
        return simulate(recording, machine(seed), spelling, load, seed, slowdown, outputs)

    found = {p: [rate(p, 0)] for p in (*rivals, policy)}
    least = NEAR * max(found[p][0] for p in rivals)
    for seed in range(1, rounds):
        for p, rates in found.items():
            if p in (policy, "off") or rates[0] >= least:
                rates.append(rate(p, seed))
    return found


def open_machine(table: str, noise: float) -> Callable[[int], Machine]:
    """Return a function of the round: a cost table's machine, or a measured GPU with new noise in its profile."""
    if table not in NAMES:
        machine = Machine.of_table(CostTable.from_json(json.loads(Path(table).read_text())))
        return lambda seed: machine
    gpu = MeasuredGpu(table)
    machines: dict[int, Machine] = {}

    def of_round(seed: int) -> Machine:
        if seed not in machines:
            machines[seed] = Machine.of_gpu(gpu, synthetic_profile(gpu, noise=noise, seed=seed))
        return machines[seed]

    return of_round


def parse_outputs(text: str) -> tuple[int, int]:
    """Parse "32,96", the least and the most output tokens of a request."""
    least, _, most = text.partition(",")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most) <= NUM_OUTPUT):
        raise argparse.ArgumentTypeError(f"outputs is {text!r}; it must be LEAST,MOST of 1 to {NUM_OUTPUT} tokens")
    return int(least), int(most)


def ratio(rates: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the geometric mean of the rounds' ratios and its standard error."""
    logs = [math.log(a / b) for a, b in zip(rates, base, strict=True)]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return math.exp(statistics.fmean(logs)), error


def row(policy: str, found: dict[str, list[float]]) -> tuple[str, float, float]:
    """Return the best rival, and the policy's ratio to it with its error."""
    rounds = len(found[policy])
    full = {p: rates for p, rates in found.items() if p != policy and len(rates) == rounds}
    best = max(full, key=lambda p: sum(map(math.log, full[p])))
    return (best, *ratio(found[policy], full[best]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="faser bench replay", description=__doc__)
    parser.add_argument("tables", nargs="+", help=f"cost tables: files, or one of {', '.join(NAMES)}")
    add_options(parser)
    parser.add_argument("--policy", default="price:mode=serial,prune=off")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="concurrent requests")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--slowdown", type=float, default=1.0, help="slow the machine by up to this factor at times")
    parser.add_argument("--outputs", type=parse_outputs, default=OUTPUTS, help="tokens: LEAST,MOST")
    parser.add_argument("--noise", type=float, default=0.01, help="noise of the points in a measured GPU's profile")
    parser.add_argument("--json", type=Path, help="also write the rates to this file")
    given = parser.parse_args(argv)
    recording = open_recording(given)
    rates: dict[str, dict[str, dict[str, list[float]]]] = {}
    print("SIMULATED. Ratio to the best rival in % (against off), by requests in flight\n")
    for name in given.tables:
        machine, stem = open_machine(name, given.noise), Path(name).stem
        print(f"| {stem} | best rival | against it | against off |\n|---|---|---|---|", flush=True)
        against_off = []
        for load in map(int, given.loads.split(",")):
            found = measure(recording, machine, given.policy, load, given.rounds, given.slowdown, given.outputs)
            rates.setdefault(stem, {})[str(load)] = found
            best, mean, error = row(given.policy, found)
            against_off.append(ratio(found[given.policy], found["off"])[0])
            print(
                f"| {load} | {best} | {100 * (mean - 1):+.1f} ± {100 * error:.1f} % | {against_off[-1]:.3f} |",
                flush=True,
            )
        print(f"| geometric mean | | | {math.exp(statistics.fmean(map(math.log, against_off))):.3f} |\n", flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(rates, indent=1) + "\n")


if __name__ == "__main__":
    main()
