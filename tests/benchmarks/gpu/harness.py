"""Sections and their context, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.machine import DryMachine
from benchmarks.gpu.options import GpuBenchOptions
from benchmarks.gpu.report.record import Record
from benchmarks.gpu.section_process import run_entry
from benchmarks.gpu.sections import SECTIONS
from tests.ops.cuda.emulation import emulated

ENTRIES = {section.name: section.entry for section in SECTIONS}


def walk(name: str, options: GpuBenchOptions, machine: DryMachine | None = None) -> dict[str, Any]:
    record = Record()
    run_entry(ENTRIES[name], options, record, 120.0, machine)
    assert record.data["status"] == "ok", record.data["errors"]
    return record.data


def bench_on(options: GpuBenchOptions, launchers: Any = None) -> Bench:
    return Bench(options, DryMachine(launchers), Record())


def emulator(stem: str, defines: Mapping[str, int] | None) -> Any:
    return emulated(stem, defines)
