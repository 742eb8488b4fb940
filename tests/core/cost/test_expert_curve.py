"""Tests of the time per expert, which is one more column of a curve's fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.core.cost.experts import Routing
from faser_trtllm.core.cost_curve import CostSample, fit_curve, read_samples
from faser_trtllm.core.cost_table import ALL, CostTable, Fingerprint
from faser_trtllm.errors import ConfigError
from faser_trtllm.profiling.grid import Limits
from faser_trtllm.profiling.measure import sample_of
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.profile import grid

HERE = Fingerprint("Some CPU", "avx2", 2, "abc")
ROUTING = Routing(128, 8, 0.15, 0.08)
PER_EXPERT_MS = 0.15
LIMITS = Limits(128, 32, 256, 8)


def dense_ms(rows, requests):
    return 3.0 + 0.02 * rows + 0.3 * (rows > 16) + 0.01 * requests


def samples(noise=0.0, quick=True, seed=0):
    """The points of a profile of a mixture; whole passes, steps without drafts, and two segments of them."""
    rng = np.random.default_rng(seed)
    found = []
    for point in grid(LIMITS, (ALL,), ProfileOptions(Path(), quick=quick), has_draft=False, has_experts=True):
        rows, requests = point.num_rows, point.num_requests
        each = rows / requests
        num_experts = (
            float(ROUTING.distinct_of(each, 1)) if point.same_tokens else float(ROUTING.distinct_of(rows, requests))
        )
        num_experts *= 1.0 + 0.5 * noise * rng.standard_normal()
        ms = (dense_ms(rows, requests) + PER_EXPERT_MS * num_experts) * (1.0 + noise * rng.standard_normal())
        if not point.held_out:
            found.append(sample_of(point, ms, num_experts))
    for rows, requests in ((1, 1), (8, 2), (32, 8), (64, 16)):
        num_experts = float(ROUTING.distinct_of(rows, requests))
        ms = dense_ms(rows, requests) + PER_EXPERT_MS * num_experts
        for segment, share in enumerate((0.25, 0.75)):
            found.append(CostSample(f"segment:{segment}", rows, requests, 64, share * ms, ALL, num_experts))
    return found


@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.02), (0.02, 0.1)])
@pytest.mark.parametrize("quick", [True, False])
def test_the_fit_finds_what_an_expert_takes(noise, error, quick):
    table = CostTable.fit(samples(noise, quick), HERE, routing=ROUTING)
    assert table.per_expert_ms == pytest.approx(PER_EXPERT_MS, rel=error)
    for rows, requests in ((1, 1), (9, 1), (16, 16), (36, 4), (128, 16)):
        expected = dense_ms(rows, requests) + PER_EXPERT_MS * float(ROUTING.distinct_of(rows, requests))
        assert table.verify_ms(rows, requests, 260) == pytest.approx(expected, rel=0.04)
        few = table.verify_ms(rows, requests, 260, ALL, 8.0)
        assert few == pytest.approx(dense_ms(rows, requests) + 8.0 * PER_EXPERT_MS, rel=0.1)


def test_steps_without_drafts_and_segments_take_what_whole_passes_do_for_an_expert():
    """Their own samples cannot tell experts from rows."""
    table = CostTable.fit(samples(), HERE, routing=ROUTING)
    assert table.curves[f"decode@{ALL}"].per_expert_ms == table.per_expert_ms
    segments = [table.curves[f"segment:{i}@{ALL}"].per_expert_ms for i in range(2)]
    assert sum(segments) == pytest.approx(table.per_expert_ms)
    assert segments[0] == pytest.approx(0.25 * table.per_expert_ms)
    assert table.decode_ms(16, 260) == pytest.approx(
        dense_ms(16, 16) + PER_EXPERT_MS * float(ROUTING.distinct_of(16, 16)), rel=0.04
    )
    fewer = table.decode_ms(16, 260) - table.decode_ms(16, 260, 8.0)
    assert fewer == pytest.approx(table.per_expert_ms * (float(ROUTING.distinct_of(16, 16)) - 8.0))


def test_arrays_agree_with_single_passes():
    table = CostTable.fit(samples(), HERE, routing=ROUTING)
    array, rows = table.verify_ms_array(64, 4, 256), table.rows_ms_array(64, 4, 256)
    for n in (1, 4, 5, 17, 36, 64):
        assert array[n] == pytest.approx(table.verify_ms(n, 4, 256))
        assert rows[n] == pytest.approx(table.verify_ms(n, 4, 256, ALL, 0.0))
    assert array[0] == 0.0


def test_a_model_without_experts_has_the_same_curves_as_ever():
    dense = [replace(sample, num_experts=0.0) for sample in samples(0.02)]
    table = CostTable.fit(dense, HERE)
    assert table.per_expert_ms == 0.0
    assert np.array_equal(table.verify_ms_array(64, 4, 256), table.rows_ms_array(64, 4, 256))


def test_what_an_expert_takes_may_be_known():
    alone = [s for s in samples() if s.kind == "decode"]
    curve = fit_curve(alone, per_expert_ms=PER_EXPERT_MS)
    assert curve.per_expert_ms == PER_EXPERT_MS
    assert curve.at(8, 8, 260, 20.0) == pytest.approx(dense_ms(8, 8) + 20.0 * PER_EXPERT_MS, rel=0.01)


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = CostTable.fit(samples(), HERE, routing=ROUTING)
    table.save(tmp_path / "profile.json")
    assert CostTable.load(tmp_path / "profile.json", HERE) == table


def test_files_of_dense_models_have_no_experts():
    item = {"kind": "verify", "num_rows": 4, "num_requests": 2, "context_len": 64, "ms": 1.0}
    assert read_samples([item]) == [CostSample("verify", 4, 2, 64, 1.0)]
    data = CostTable.fit(samples(), HERE, routing=ROUTING).to_json()
    del data["routing"]
    assert CostTable.from_json(data).routing is None


@pytest.mark.parametrize(
    "routing", [{"num_experts": 0, "top_k": 0}, {"num_experts": 8, "top_k": 2, "overlap": 7.0}, {"num_experts": "many"}]
)
def test_a_routing_that_no_layer_can_have_is_refused(routing):
    data = json.loads(json.dumps(CostTable.fit(samples(), HERE, routing=ROUTING).to_json())) | {"routing": routing}
    with pytest.raises(ConfigError, match="routing"):
        CostTable.from_json(data)
