"""Test and measure kernels, engines and policies on an NVIDIA GPU.

Results are written as they come, so an aborted run keeps them. The report begins with failures; the exit code is 1 if
there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.flags import Flags, say
from benchmarks.gpu.options import GpuBenchOptions
from benchmarks.gpu.report.failures import failures
from benchmarks.gpu.runner import run_gpu_bench

DEMO = Path("engines/demo")
EXAMPLE = """Examples:
  faser bench gpu --output_dir gpu_results
  faser bench gpu --output_dir gpu_results --sections environment,kernels
  without a GPU: --dry_run"""


def main(argv: Sequence[str] | None = None) -> int:
    flags = Flags("gpu", GpuBenchOptions, __doc__, EXAMPLE)
    flags.flag("output_dir", "directory for gpu.json, gpu.md, gpu.png and the cost tables")
    flags.flag(
        "checkpoint_dir", "target checkpoint, which is enlarged to the shapes of --forms", default=DEMO / "target"
    )
    flags.flag("draft_checkpoint_dir", "draft checkpoint", default=DEMO / "draft")
    flags.flag("sections", "sections to run, separated by commas; default: all")
    flags.flag("forms", "shapes of the target, in the order of measurement")
    flags.flag("concurrency", "concurrent requests for the policies, in the order of measurement")
    flags.flag("minutes", "minutes for all sections; those that do not fit are left out")
    flags.flag("dry_run", "run tiny shapes on the CPU, to check that everything works")
    options = flags.parse(argv)
    report = run_gpu_bench(options, say)
    print((options.output_dir / "gpu.md").read_text())
    return 1 if failures(report) else 0


if __name__ == "__main__":
    sys.exit(main())
