"""Cost tables of the sections."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.gpu.engines import calibration, costs
from benchmarks.gpu.models import prompts
from benchmarks.gpu.models.cuda_engines import PairLimits
from benchmarks.gpu.models.pair import open_pair
from benchmarks.gpu.options import GpuBenchOptions
from faser_trtllm.core.cost_table import CostSample, CostTable
from faser_trtllm.core.curve_error import CurveError
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


@pytest.mark.parametrize(("held_out", "left_out"), [(0.16, False), (0.02, True)])
def test_a_curve_that_does_not_fit_fails_the_section(options: GpuBenchOptions, held_out: float, left_out: bool) -> None:
    samples = [CostSample(kind, 1, 1, 16, 1.0) for kind in ("verify", "draft_step")]
    table = CostTable.fit(samples, bench_on(options).machine.fingerprint(b"x"))
    bad = dataclasses.replace(table, errors={"verify@all": CurveError(0.01, held_out, left_out=left_out)})
    for is_dry, which, num_errors in ((False, table, 0), (False, bad, 1), (True, bad, 0)):
        bench = bench_on(dataclasses.replace(options, dry_run=is_dry))
        costs.judge(bench, "1B", which)
        assert len(bench.record.data["errors"]) == num_errors
        assert bench.record.data["tables"][0]["rows"]
