"""Fuzzes one target with atheris: python -m tests.fuzz TARGET --seconds 60 --work_dir DIR.

DIR/TARGET/corpus grows with inputs that reach something new, and the next run goes on with it; DIR/TARGET/findings gets
one input for each kind of fault; DIR/TARGET/stats.json sums up the executions and CPU seconds of all runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
import warnings
from pathlib import Path
from typing import NoReturn

NOTE_S = 2.0  # between two writes of stats.json: libFuzzer ends the process itself


class Stats:
    """Executions and CPU seconds, added to those of earlier runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = json.loads(path.read_text()) if path.exists() else {"runs": 0, "cpu_s": 0.0}
        self._num_runs = 0
        self._next_s = 0.0

    def count(self) -> None:
        self._num_runs += 1
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + NOTE_S
            found = {"runs": self._before["runs"] + self._num_runs}
            found["cpu_s"] = round(self._before["cpu_s"] + time.process_time(), 1)
            self._path.write_text(json.dumps(found))


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description="Fuzz one target with atheris.")
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--work_dir", type=Path, required=True)
    args = parser.parse_args()
    os.environ["RUST_BACKTRACE"] = "0"
    warnings.simplefilter("ignore")
    import atheris

    # atheris skips modules of an editable install's own loader; without its finder they come from this folder.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable_")]
    with atheris.instrument_imports(include=["faser_trtllm"], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS
    if not type(sys.modules["faser_trtllm"].__loader__).__module__.startswith("atheris"):
        sys.exit("tests.fuzz: atheris did not instrument faser_trtllm, so nothing would guide it; run it in a checkout")
    from tests.fuzz.mutation import mutated
    from tests.fuzz.target import FindingError

    target = TARGETS[args.target]
    corpus, findings = (args.work_dir / target.name / name for name in ("corpus", "findings"))
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    for data in target.inputs():
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    known = {path.name for path in findings.iterdir()}
    stats = Stats(args.work_dir / target.name / "stats.json")

    def test(data: bytes) -> None:
        stats.count()
        try:
            target.check(data)
        except FindingError as finding:
            if finding.key not in known:
                known.add(finding.key)
                (findings / finding.key).write_bytes(data)
                print(f"finding {finding.key}: {str(finding)[-2000:]}", file=sys.stderr)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        found = mutated(
            target, data, random.Random(seed), lambda piece: atheris.Mutate(piece, max(len(piece) + 64, 64))
        )
        return found[:max_size]

    flags = [f"-max_total_time={args.seconds}", f"-max_len={target.max_bytes}", "-len_control=0", "-timeout=60"]
    flags += ["-rss_limit_mb=4096", "-malloc_limit_mb=2048", "-detect_leaks=0", f"-artifact_prefix={findings}/crash-"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], test, custom_mutator=mutate)
    atheris.Fuzz()
    sys.exit(0)


if __name__ == "__main__":
    main()
