"""The sections "breakdown" and "row_counts"."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu.engines import breakdown, row_counts
from benchmarks.gpu.engines.kernel_times import kernel_times
from benchmarks.gpu.machine import DryMachine
from benchmarks.gpu.options import GpuBenchOptions
from faser_trtllm.core.batch import RaggedBatch
from tests.benchmarks.gpu.harness import walk


def test_kernels_are_counted_by_the_run_and_the_longest_come_first() -> None:
    left, right = torch.randn(200, 200), torch.randn(200, 200)

    def work() -> None:
        left @ right
        for _ in range(3):
            left.neg()

    work()
    kernels, _ = kernel_times(DryMachine(), work, 5)
    launches = {kernel.name: kernel.launches for kernel in kernels}
    assert (launches["aten::mm"], launches["aten::neg"]) == (1, 3)
    times = [kernel.us for kernel in kernels]
    assert times == sorted(times, reverse=True)


def test_a_breakdown_has_a_column_for_each_context(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "DRY_CONTEXTS", (16, 24))
    monkeypatch.setattr(breakdown, "MAX_KERNELS", 3)
    tables = walk("breakdown", options)["tables"]
    assert len(tables) == len(breakdown.DRY_POINTS)
    for table in tables:
        assert table["header"] == ["kernel", "launches", "us at 16", "us at 24"]
        *kernels, others, everything = table["rows"]
        assert len(kernels) == 3
        assert (others[0].split()[1], everything[0]) == ("others", "all")
        for column in (2, 3):
            parts = [float(row[column]) for row in (*kernels, others)]
            assert abs(sum(parts) - float(everything[column])) <= len(parts)  # each is rounded


def test_row_counts_are_run_first_and_again_on_both_engines(
    options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    time_pass = row_counts.time_pass

    def noted(engine: Any, batch: RaggedBatch) -> row_counts.PassTime:
        seen.append((id(engine), batch.num_rows))
        return time_pass(engine, batch)

    monkeypatch.setattr(row_counts, "time_pass", noted)
    found = walk("row_counts", options)
    first, second = row_counts.DRY_COUNTS
    rows = [count for _, count in seen]
    assert rows == 2 * [*3 * [row_counts.DRY_SEEN], first, second, first, second]
    assert len({engine for engine, _ in seen}) == 2
    for table in found["tables"]:
        assert [int(row[0]) for row in table["rows"]] == [first, second]
        assert all(float(cell) > 0 for row in table["rows"] for cell in row[1:])
