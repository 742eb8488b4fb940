"""Copies inputs to tests/fuzz/corpus that reach what nothing kept does: python -m tests.fuzz.keep [--work_dir DIR].

Looks at the corpora and findings of DIR, at the neighbors of the seeds and at some mutations, small inputs first. What
counts are steps from one line to another in the target's modules.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.mutation import mutated, neighbors
from tests.fuzz.target import CORPUS, FindingError, Target
from tests.fuzz.targets import TARGETS

PACKAGE = Path(__file__).parents[2] / "faser_trtllm"
MAX_KEPT_BYTES = 24 << 10  # of an input
MAX_CORPUS_BYTES = 44 << 10  # of a target
MAX_SEEDS = 12  # of a target, whose neighbors are made
NUM_MUTATIONS = 3000

Step = tuple[str, int, int]


class Steps:
    """The steps between lines of some files while it is entered."""

    def __init__(self, files: set[str]) -> None:
        self._files = files
        self.found: set[Step] = set()

    def __enter__(self) -> Steps:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self._files:
            return None
        last = 0

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            self.found.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return line

        return line


def steps_of(target: Target, data: bytes) -> set[Step]:
    """Return the steps that an input takes. A finding takes steps too, and is an input to keep."""
    with Steps({str(PACKAGE / module) for module in target.modules}) as steps:
        try:
            target.check(data)
        except FindingError as finding:
            print(f"finding in {target.name}: {finding.key}", file=sys.stderr)
    return steps.found


def keep(target: Target, work_dir: Path | None) -> None:
    rng = random.Random(0)
    inputs = target.inputs()
    known = set().union(*(steps_of(target, data) for data in inputs))
    found = [other for data in target.seeds()[:MAX_SEEDS] for other in neighbors(target, data)]
    found += [mutated(target, rng.choice(inputs), rng) for _ in range(NUM_MUTATIONS)]
    if work_dir is not None:
        found += [
            path.read_bytes() for kind in ("corpus", "findings") for path in (work_dir / target.name / kind).glob("*")
        ]
    folder = CORPUS / target.name
    num_bytes = sum(path.stat().st_size for path in folder.glob("*"))
    for data in sorted(set(found), key=lambda data: (len(data), data)):
        if len(data) > min(MAX_KEPT_BYTES, MAX_CORPUS_BYTES - num_bytes):
            break
        steps = steps_of(target, data)
        if not steps <= known:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
            known |= steps
            num_bytes += len(data)
    print(f"{target.name}: {len(list(folder.glob('*')))} inputs, {num_bytes} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep inputs that reach something new.")
    parser.add_argument("--target", action="append")
    parser.add_argument("--work_dir", type=Path)
    args = parser.parse_args()
    os.environ["RUST_BACKTRACE"] = "0"
    warnings.simplefilter("ignore")
    for name in args.target or TARGETS:
        keep(TARGETS[name], args.work_dir)


if __name__ == "__main__":
    main()
