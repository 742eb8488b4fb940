"""`python -m benchmarks.gpu`: same as `faser bench gpu`, for machines without the dependencies of other commands."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.options import FORMS, GpuBenchOptions
from benchmarks.gpu.report.failures import failures
from benchmarks.gpu.runner import run_gpu_bench
from faser_trtllm.errors import FaserError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--checkpoint_dir", type=Path, default=Path("engines/demo/target"))
    parser.add_argument("--draft_checkpoint_dir", type=Path, default=Path("engines/demo/draft"))
    parser.add_argument("--sections", default="", help="names separated by commas; default: all")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--dry_run", action="store_true")
    given = parser.parse_args()
    options = GpuBenchOptions(
        checkpoint_dir=given.checkpoint_dir,
        draft_checkpoint_dir=given.draft_checkpoint_dir,
        output_dir=given.output_dir,
        sections=tuple(filter(None, given.sections.split(","))),
        forms=tuple(filter(None, given.forms.split(","))),
        minutes=given.minutes,
        dry_run=given.dry_run,
        command_line=tuple(sys.argv),
    )
    try:
        report = run_gpu_bench(options, lambda line: print(line, file=sys.stderr, flush=True))
    except FaserError as error:
        print(f"faser: {error}", file=sys.stderr)
        return 2
    print((options.output_dir / "gpu.md").read_text())
    return 1 if failures(report) else 0


if __name__ == "__main__":
    sys.exit(main())
