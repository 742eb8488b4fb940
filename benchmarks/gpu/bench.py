"""The context of a section."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.options import GpuBenchOptions
from benchmarks.gpu.report.record import Record

RESULT_FILE = "gpu.json"


@dataclass
class Bench:
    """The running section. deadline_s: on time.monotonic(); a section that checks it can finish cleanly."""

    options: GpuBenchOptions
    machine: Machine
    record: Record
    deadline_s: float = field(default_factory=lambda: time.monotonic() + 3600.0)

    @property
    def is_dry(self) -> bool:
        """True for tiny shapes, whatever the machine."""
        return self.options.dry_run

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def forms(self, seconds_each: float) -> Iterator[str]:
        """Yield the forms that fit the time, at least the first (in a dry run only that); note the others."""
        first, *others = self.options.forms
        yield first
        for form in () if self.is_dry else others:
            if self.left_s < seconds_each:
                self.record.note(f"{form}: the time was over")
            else:
                yield form

    def found_before(self, section: str, name: str) -> Any:
        """Return a value that an earlier section of this run recorded, or None."""
        try:
            sections = json.loads((self.options.output_dir / RESULT_FILE).read_text())["sections"]
        except (OSError, ValueError, KeyError):
            return None
        return sections.get(section, {}).get("values", {}).get(name)

    def ceilings(self) -> Ceilings:
        """Ceilings measured by the section "environment", else an H200's data sheet: 4.8 TB/s and 990 TFLOP/s."""
        found = self.found_before("environment", "ceilings")
        if found:
            return Ceilings(found["bytes_per_s"], found["flops_per_s"], measured=True)
        return Ceilings(4.8e12, 990e12, measured=False)

    def file(self, name: str) -> Path:
        return self.options.output_dir / name


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second of device memory, and bf16 operations per second of the tensor cores."""

    bytes_per_s: float
    flops_per_s: float
    measured: bool

    def floor_ms(self, num_bytes: float, num_flops: float = 0.0) -> float:
        """Return the roofline time."""
        return 1e3 * max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)
