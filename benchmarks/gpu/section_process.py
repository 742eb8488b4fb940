"""Run one section in this process: `python -m benchmarks.gpu.section_process RESULT_FILE < job.json`.

It is separate because an out-of-bounds kernel destroys its CUDA context.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.machine import Machine, open_machine
from benchmarks.gpu.options import GpuBenchOptions
from benchmarks.gpu.report.failures import OK, SKIPPED
from benchmarks.gpu.report.record import Record
from benchmarks.gpu.skipped import Skipped
from faser_trtllm.errors import FaserError


def run_entry(
    entry: str, options: GpuBenchOptions, record: Record, budget_s: float, machine: Machine | None = None
) -> None:
    """Call "module:function" with a Bench; the record gets status and seconds. machine: by default by options."""
    start = time.monotonic()
    record.set("status", "running")
    try:
        module, _, name = entry.partition(":")
        function: Callable[[Bench], None] = getattr(importlib.import_module(module), name)
        # End before the parent kills this process.
        deadline_s = start + 0.9 * budget_s
        function(Bench(options, machine or open_machine(options.dry_run), record, deadline_s))
        num_errors = len(record.data["errors"])
        status = OK if not num_errors else f"{num_errors} measurement(s) failed"
    except Skipped as error:
        status = f"{SKIPPED}{error}"
    except FaserError as error:
        status = f"not run: {error}"
    except Exception as error:
        traceback.print_exc()
        status = f"failed: {type(error).__name__}: {error}"[:600]
    record.set("seconds", round(time.monotonic() - start, 1))
    record.set("status", status)


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    record = Record(Path(sys.argv[1]))
    run_entry(job["entry"], GpuBenchOptions.from_dict(job["options"]), record, job["budget_s"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an error while CUDA is torn down must not invalidate a written result


if __name__ == "__main__":
    main()
