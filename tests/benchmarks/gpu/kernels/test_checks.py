"""The section "kernels" agrees with the references and finds what does not."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.kernels import checks
from benchmarks.gpu.kernels.expected import LAUNCH_US
from benchmarks.gpu.machine import DryMachine, num_copies
from benchmarks.gpu.options import GpuBenchOptions
from faser_trtllm.errors import ConfigError
from faser_trtllm.ops.cuda.compiler import find_nvcc
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


def test_on_a_gpu_each_time_stands_next_to_the_model_s(
    options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Machine(DryMachine):
        is_gpu = True

    try:
        find_nvcc()
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(checks, "device_arch", lambda: "sm_90")
    monkeypatch.setattr(checks, "FAMILIES", {op: checks.FAMILIES[op] for op in ("gated_silu", "take_step")})
    found = walk("kernels", options, Machine(emulator))
    assert [len(table["rows"]) for table in found["tables"]] == [2, 1]
    for table in found["tables"]:
        place = table["header"].index("modeled us")
        assert all(LAUNCH_US <= float(row[place]) < LAUNCH_US + 1 for row in table["rows"])
    assert all(result["modeled_us"] >= LAUNCH_US for result in found["values"]["gated_silu"])


def test_inputs_rotate_until_they_outgrow_the_cache() -> None:
    assert num_copies(10, 100) == 40
    assert num_copies(500, 100) == 1
    assert num_copies(1, 10**9) == 64
