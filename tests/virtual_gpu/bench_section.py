"""Sections of `faser bench gpu` on the machine that a GPU would be, with the tiny shapes of a dry run."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from benchmarks.gpu import machine, runner, section_process
from benchmarks.gpu.backends import section
from benchmarks.gpu.engines import peers
from benchmarks.gpu.kernels import partitions
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.skipped import Skipped
from tests.virtual_gpu.device import random

SLOWER = 20.0  # than the GPU that the sections' time limits are for


class VirtualMachine(machine.GpuMachine):
    """Times mean nothing, so one call is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.l2_bytes = 1 << 10

    def time_ms(self, calls: Sequence[machine.Call], num_repeats: int = 1) -> float:
        return super().time_ms(calls[:1], 1)


def use_in_bench() -> None:
    """The command's sections run in processes with the virtual GPU."""
    runner.SECTION_PROCESS = (sys.executable, "-m", "tests.virtual_gpu", "section_process")
    patient = [dataclasses.replace(section, limit_s=SLOWER * section.limit_s) for section in SECTIONS]
    runner.run_gpu_bench = functools.partial(runner.run_gpu_bench, sections=patient)


def main() -> None:
    """Run benchmarks.gpu.section_process; sys.argv[1] is the result's file."""
    random.install()
    machine.CLOCK_SIZE, machine.CLOCK_S, machine.CALLS_PER_GRAPH = 32, 0.0, 1
    replaced: dict[str, tuple[Any, Any]] = {
        "open_machine": (section_process, lambda dry_run: VirtualMachine()),
        "check_installed": (section, lambda bench, backend: None),  # there is no module: the builder is a stand-in
        "Streams": (partitions, _skip),
        "run": (peers, _skip),
    }
    for name, (module, stand_in) in replaced.items():
        setattr(module, name, stand_in)
    section_process.main()


def _skip(*_: Any) -> NoReturn:
    raise Skipped("it asks torch for CUDA itself, which the virtual GPU does not have")
