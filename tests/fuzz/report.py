"""Report how much of the parsers the corpora reach: python -m tests.fuzz.report [--target T] [--work_dir DIR].

Runs seeds with their neighbors, the kept corpus and that of DIR, and prints for each target executions, CPU minutes
and findings, and for each of its modules the share of lines that were run. Status 1 with findings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import coverage

NO_PARSER = (
    r"raise NotImplementedError",
    r"class (GrpcClient|PlanFileWriter)\b",
    r"def (write_\w+|pack_\w+|unpack_\w+|to_json|save|fit|make_chunk|named|sequences|infer_input)\(",
    r"def (frame|text|response|error_response|final_flag|check_measured|from_acceptance|_check_tools)\(",
)
"""Functions in the modules of parsers that write, or call no parser: their lines do not count."""
MAX_SEEDS, MAX_NEIGHBORS = 12, 1500  # of a target: seeds whose neighbors are made, and how many of these are run
PACKAGE = Path(__file__).parents[2] / "faser_trtllm"


def main() -> int:
    parser = argparse.ArgumentParser(description="Coverage of the fuzz targets' corpora.")
    parser.add_argument("--target", action="append")
    parser.add_argument("--work_dir", type=Path)
    args = parser.parse_args()
    os.environ["RUST_BACKTRACE"] = "0"
    warnings.simplefilter("ignore")
    measured = coverage.Coverage(data_file=None, include=[f"{PACKAGE}/*"])
    for pattern in NO_PARSER:
        measured.exclude(pattern)
    measured.start()
    from tests.fuzz.mutation import neighbors
    from tests.fuzz.target import FindingError, Target
    from tests.fuzz.targets import TARGETS

    def run(target: Target, data: bytes) -> Iterator[str]:
        try:
            target.check(data)
        except FindingError as finding:
            yield finding.key

    print(f"{'target':<20} {'runs':>10} {'CPU min':>8} {'inputs':>7}  findings")
    status = 0
    for name in args.target or TARGETS:
        target = TARGETS[name]
        found, stats = [], {"runs": 0, "cpu_s": 0.0}
        if args.work_dir is not None and (args.work_dir / name).is_dir():
            place = args.work_dir / name
            found = [path.read_bytes() for path in sorted((place / "corpus").iterdir())]
            found += [path.read_bytes() for path in sorted((place / "findings").iterdir())]
            if (place / "stats.json").exists():
                stats = json.loads((place / "stats.json").read_text())
        others = [other for data in target.seeds()[:MAX_SEEDS] for other in neighbors(target, data)]
        kept = target.inputs() + random.Random(0).sample(others, min(len(others), MAX_NEIGHBORS))
        keys = {key for data in kept for key in run(target, data)}
        keys |= {key for data in found for key in run(target, data)}
        status |= bool(keys)
        num_inputs = len(kept) + len(found)
        print(f"{name:<20} {stats['runs']:>10} {stats['cpu_s'] / 60:>8.1f} {num_inputs:>7}  {', '.join(sorted(keys))}")
    measured.stop()
    print(f"\n{'module':<40} {'lines':>6} {'run':>6}  not run")
    for module in dict.fromkeys(module for name in args.target or TARGETS for module in TARGETS[name].modules):
        _, lines, _, missing, text = measured.analysis2(str(PACKAGE / module))
        share = 100 * (1 - len(missing) / len(lines))
        print(f"{module:<40} {len(lines):>6} {share:>5.1f}%  {text}")
    return status


if __name__ == "__main__":
    sys.exit(main())
