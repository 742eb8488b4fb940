"""`python -m benchmarks.replay TABLE...`: price against off, all fixed lengths and schedule, simulated by load.

A table is a cost table's JSON file (a profile.json, or one that was modelled). Every policy meets the same requests;
the rival is the one with the highest mean rate of all rounds of its load. Errors are standard errors over the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay.recording import Recording, record
from benchmarks.replay.simulate import simulate
from faser_trtllm.core.cost_table import CostTable

LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_DRAFT_LEN = 8
FIXED = tuple(f"fixed:{k}" for k in range(1, MAX_DRAFT_LEN + 1))
NEAR = 0.975  # of the best rival of the first round: whoever is below does not run in the others


def measure(
    recording: Recording, table: CostTable, policy: str, load: int, rounds: int, slowdown: float
) -> dict[str, list[float]]:
    """Rates by policy and round; slow rivals have the first round only."""
    rivals = ("off", *FIXED, "schedule")
    found = {p: [simulate(recording, table, p, load, 0, slowdown)] for p in (*rivals, policy)}
    least = NEAR * max(found[p][0] for p in rivals)
    for seed in range(1, rounds):
        for p, rates in found.items():
            if p in (policy, "off") or rates[0] >= least:
                rates.append(simulate(recording, table, p, load, seed, slowdown))
    return found


def ratio(rates: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """The geometric mean of the rounds' ratios and its standard error."""
    logs = [math.log(a / b) for a, b in zip(rates, base, strict=True)]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return math.exp(statistics.fmean(logs)), error


def row(policy: str, found: dict[str, list[float]]) -> tuple[str, float, float]:
    """-> the best rival, and the policy's ratio to it with its error."""
    rounds = len(found[policy])
    full = {p: rates for p, rates in found.items() if p != policy and len(rates) == rounds}
    best = max(full, key=lambda p: sum(map(math.log, full[p])))
    return (best, *ratio(found[policy], full[best]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--checkpoint_dir", type=Path, default=Path("engines/demo/target"))
    parser.add_argument("--draft_checkpoint_dir", type=Path, default=Path("engines/demo/draft"))
    parser.add_argument("--recording", type=Path, help="kept here, and used again if it is there")
    parser.add_argument("--policy", default="price:mode=serial,prune=off")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="requests in flight")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--slowdown", type=float, default=1.0, help="the machine is up to so many times slower at times"
    )
    parser.add_argument("--json", type=Path, help="write the rates here, too")
    given = parser.parse_args()
    if given.recording is not None and given.recording.exists():
        recording = Recording.load(given.recording)
    else:
        recording = record(given.checkpoint_dir, given.draft_checkpoint_dir, MAX_DRAFT_LEN)
        if given.recording is not None:
            recording.save(given.recording)
    rates: dict[str, dict[str, dict[str, list[float]]]] = {}
    print("SIMULATED. Ratio to the best rival in % (against off), by requests in flight\n")
    for path in given.tables:
        table = CostTable.from_json(json.loads(path.read_text()))
        print(f"| {path.stem} | best rival | against it | against off |\n|---|---|---|---|", flush=True)
        against_off = []
        for load in map(int, given.loads.split(",")):
            found = measure(recording, table, given.policy, load, given.rounds, given.slowdown)
            rates.setdefault(path.stem, {})[str(load)] = found
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
