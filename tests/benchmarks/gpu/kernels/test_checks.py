"""The section "kernels" agrees with the references and finds what does not."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.kernels import checks
from benchmarks.gpu.machine import DryMachine, num_copies
from benchmarks.gpu.options import GpuBenchOptions
from tests.benchmarks.gpu.harness import bench_on, emulator, walk


def test_kernels_agree_with_their_references(options: GpuBenchOptions) -> None:
    """The very kernels, on the CPU: launches, arguments and comparisons of the section are right."""
    found = walk("kernels", options, DryMachine(emulator))
    for op in checks.FAMILIES:
        for result in found["values"][op]:
            assert result["error"] <= 1.0
            assert result["ms"] is not None


@pytest.mark.parametrize("stem", list(checks.FAMILIES))
def test_a_kernel_that_writes_nothing_is_found(options: GpuBenchOptions, stem: str) -> None:
    class Silent:
        def launch(self, *arguments: Any) -> None:
            """Leaves the outputs as they were."""

    bench = bench_on(options, lambda name, defines: Silent() if name == stem else emulator(name, defines))
    checks._family(bench, stem, checks.FAMILIES[stem])
    assert any("is WRONG" in line for line in bench.record.data["errors"])


def test_inputs_rotate_until_they_outgrow_the_cache() -> None:
    assert num_copies(10, 100) == 40
    assert num_copies(500, 100) == 1
    assert num_copies(1, 10**9) == 64
