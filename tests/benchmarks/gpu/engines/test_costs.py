"""Cost tables of the sections, and the policies that go by them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.engines import calibration, costs, policies
from benchmarks.gpu.models import prompts
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import open_pair
from benchmarks.gpu.options import GpuBenchOptions
from faser_trtllm.core.cost_table import CostSample, CostTable
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.profiling import exit_models
from tests.benchmarks.gpu.harness import bench_on, walk
from tests.support.effort import ONLY_ALL


@ONLY_ALL
def test_cost_tables_serve_the_policies(options: GpuBenchOptions) -> None:
    found = walk("costs", options)
    assert "error 1B" in found["values"]
    assert found["values"]["overhead_ms 1B"] > 0
    table = CostTable.from_json(json.loads((options.output_dir / costs.cost_file("1B")).read_text()))
    assert table.num_segments == 2
    assert set(table.partitions) == {"all", "verify"}
    assert table.interference_of("draft", "verify") is not None
    for spelling in ("schedule", "price"):
        make_policy(spelling, 4, table, 2)


@ONLY_ALL
def test_exits_are_calibrated_on_real_drafts(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "DRY_NUM_PROMPTS", 10)
    monkeypatch.setattr(exit_models, "MIN_OBSERVATIONS", 40)
    bench = bench_on(dataclasses.replace(options, max_tokens=16))
    with open_pair(bench, "1B", PairLimits(5, 48, 64), overlap=True) as pair:
        table = costs.measure_table(bench, pair, 16)
        whole = calibration.calibrated(bench, pair, table)
    assert [model.boundary for model in whole.exits] == [1]
    assert whole.curves == table.curves
    assert bench.record.data["tables"][-1]["rows"]


@ONLY_ALL
def test_policies_are_measured_on_the_same_requests(options: GpuBenchOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "NUM_ROUNDS", 2)
    monkeypatch.setattr(policies, "OVERLAPPED", {"fixed:4 ping_pong": "fixed:4,mode=ping_pong"})
    found = walk("policies", options)
    rates = found["tables"][0]
    assert rates["header"] == ["system", "1", "2"]
    names = [row[0] for row in rates["rows"]]
    assert names[0] == "off"
    assert {"fixed:2", "fixed:4 ping_pong", "schedule", "gp_lcb", "price", "price+pruning"} <= set(names)
    assert all(cell != "-" for row in rates["rows"] for cell in row)


def test_slow_fixed_lengths_are_left_out_after_the_first_round() -> None:
    class Rate:
        def __init__(self, tokens_per_s: float) -> None:
            self.tokens_per_s = tokens_per_s

    names = ["off", "fixed:1", "fixed:2", "fixed:3", "fixed:4 ping_pong"]
    results: Any = {(4, f"fixed:{k}"): [Rate(k)] for k in (1, 2, 3)}
    assert policies._kept(names, results, 4, 0) == names
    assert policies._kept(names, results, 4, 1) == ["off", "fixed:2", "fixed:3", "fixed:4 ping_pong"]


def test_a_table_of_another_pair_or_gpu_is_measured_again(
    options: GpuBenchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_on(dataclasses.replace(options, output_dir=tmp_path))
    monkeypatch.setattr(policies, "measure_table", lambda *arguments: again)
    with open_pair(bench, "1B", PairLimits(2, 48, 64)) as pair:
        samples = [CostSample(kind, 1, 1, 16, 1.0) for kind in ("verify", "draft_step")]
        again, fitting = (CostTable.fit(samples, bench.machine.fingerprint(what)) for what in (b"x", pair.made_of))
        again.save(tmp_path / costs.cost_file("1B"))
        assert policies._table(bench, pair) is again
        assert "engine is" in bench.record.data["values"]["table of 1B measured again"]
        fitting.save(tmp_path / costs.cost_file("1B"))
        assert policies._table(bench, pair) == fitting
