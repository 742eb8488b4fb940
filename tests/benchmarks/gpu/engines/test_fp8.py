"""The section "fp8"."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.engines import fp8
from benchmarks.gpu.machine import DryMachine
from benchmarks.gpu.options import GpuBenchOptions
from benchmarks.gpu.report.record import Record
from benchmarks.gpu.section_process import run_entry
from faser_trtllm.errors import ConfigError
from tests.benchmarks.gpu.harness import ENTRIES, emulator, walk


def test_fp8_is_compared_with_bf16(options: GpuBenchOptions) -> None:
    """The same weights in both, so their passes differ, their tokens hardly, and speculation changes neither."""
    only = lambda stem, defines: emulator(stem, defines) if stem == "quantize_rows" else None  # noqa: E731
    found = walk("fp8", options, DryMachine(only))
    assert found["values"]["num_faults"] == 0
    products, passes, memory, _ = found["tables"]
    assert [row[0] for row in products["rows"]] == ["1", "4"]
    assert all(row[-1] == "0" for row in products["rows"]), "on the CPU a row is the same alone"
    assert 0 < found["values"]["error of a product"] < 0.004, "bf16's rounding of the result"
    assert {row[0] for row in passes["rows"]} == {"1", "2"}
    assert float(memory["rows"][1][1]) < float(memory["rows"][0][1])
    assert 0 < found["values"]["tokens as in bf16"] <= 1


def test_fp8_without_fp8_is_said_and_no_fault(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Any) -> None:
        raise ConfigError("quantization is fp8, and this GPU has none")

    monkeypatch.setattr(fp8, "check_product", refuse)
    record = Record()
    run_entry(ENTRIES["fp8"], options, record, 120.0, None)
    assert record.data["status"] == "skipped: quantization is fp8, and this GPU has none"
