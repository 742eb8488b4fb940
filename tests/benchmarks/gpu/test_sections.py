"""Every section of the GPU suite, walked through on the CPU with tiny shapes; kernels by the emulator where it matters.

What this cannot show: that it works on a GPU, and any time. benchmarks/gpu/README.md lists those that have run on one.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.gpu.machine import DryMachine
from benchmarks.gpu.options import GpuBenchOptions
from benchmarks.gpu.report.record import Record
from benchmarks.gpu.section_process import run_entry
from tests.benchmarks.gpu.harness import ENTRIES, emulator, walk


@pytest.mark.parametrize("name", ["environment", "gemms", "steps", "partitions"])
def test_sections_walk_their_plan(options: GpuBenchOptions, name: str) -> None:
    found = walk(name, options)
    assert found["tables"]
    assert all(table["rows"] for table in found["tables"])


def test_a_row_of_matmul_s_is_as_alone(options: GpuBenchOptions) -> None:
    only = lambda stem, defines: emulator(stem, defines) if stem == "matmul" else None  # noqa: E731
    found = walk("gemms", options, DryMachine(only))
    products, passes = found["tables"]
    assert products["header"][-1] == "matmul's rows not as alone"
    assert [row[-1] for row in products["rows"]] == ["0"] * len(passes["rows"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(ENTRIES))
def test_on_a_gpu(options: GpuBenchOptions, name: str) -> None:
    """Every section as it is meant, on a form that is quick; how well a cost curve fits depends on who else runs."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    given = dataclasses.replace(options, dry_run=False, concurrency=(1, 4), prompt_len=16, max_tokens=16)
    record = Record()
    run_entry(ENTRIES[name], given, record, 100.0)
    others = [error for error in record.data["errors"] if "more than 15 %" not in error]
    if others or not record.data["errors"]:
        assert record.data["status"].startswith(("ok", "skipped: ")), record.data["errors"]
