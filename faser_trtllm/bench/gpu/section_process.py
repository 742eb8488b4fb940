"""Runs one section in this process: `python -m faser_trtllm.bench.gpu.section_process RESULT_FILE < job.json`.

A process of its own, because a kernel that reads out of bounds takes its CUDA context with it.
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

from faser_trtllm.bench.gpu.bench import Bench
from faser_trtllm.bench.gpu.machine import Machine, open_machine
from faser_trtllm.bench.gpu.options import GpuBenchOptions
from faser_trtllm.bench.gpu.record import Record
from faser_trtllm.errors import FaserError


def run_entry(
    entry: str, options: GpuBenchOptions, record: Record, budget_s: float, machine: Machine | None = None
) -> None:
    """Call "module:function" with a Bench; the record gets status and seconds. machine: default: what options ask."""
    start = time.monotonic()
    record.set("status", "running")
    try:
        module, _, name = entry.partition(":")
        function: Callable[[Bench], None] = getattr(importlib.import_module(module), name)
        # Ends before the parent would kill it.
        deadline_s = start + 0.9 * budget_s
        function(Bench(options, machine or open_machine(options.dry_run), record, deadline_s))
        num_errors = len(record.data["errors"])
        status = "ok" if not num_errors else f"{num_errors} measurement(s) failed"
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
    os._exit(0)  # an error while CUDA is torn down must not spoil a result that is written


if __name__ == "__main__":
    main()
