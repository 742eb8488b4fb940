"""Quick profiles of GPUs that exist as physics only (tests/support/synthetic_gpu.py): how far their curves are off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from faser_trtllm.core.cost_table import CostTable, Fingerprint
from faser_trtllm.core.curve_error import mean_error
from faser_trtllm.profiling.grid import Limits, held_out_points
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.profile import grid
from tests.support.synthetic_gpu import GPUS, SyntheticGpu

HERE = Fingerprint("A GPU", "sm_90", 132, "abc")
LIMITS = Limits(max_rows=1280, max_num_requests=256, max_context=320, max_draft_len=8)
SEEDS = range(10)
KINDS = {"verify", "draft_step", "draft_rows", "decode"}
MAX_ERROR = 0.05

by_gpu = pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))


def profile(gpu: SyntheticGpu, noise: float, seed: int, quick: bool = True) -> CostTable:
    points = grid(LIMITS, ("all",), ProfileOptions(Path("engines"), quick=quick, seed=seed))
    samples, held_out = gpu.samples(points, noise, seed)
    return CostTable.fit(samples, HERE, held_out=held_out, quick=quick)


@by_gpu
@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_quick_profile_fits_what_it_held_out(gpu: SyntheticGpu, noise: float, seed: int) -> None:
    table = profile(gpu, noise, seed)
    assert {key.partition("@")[0] for key in table.errors} == KINDS
    held_out = {key: error.held_out for key, error in table.errors.items()}
    assert all(error is not None and error <= MAX_ERROR for error in held_out.values()), held_out
    assert not table.warnings


@by_gpu
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("seed", SEEDS)
def test_it_fits_what_it_never_saw(gpu: SyntheticGpu, noise: float, seed: int) -> None:
    """The truth at some fifty points: noise in a held-out point would be no error of the fit."""
    table = profile(gpu, noise, seed)
    points = [point for other in range(4) for point in held_out_points(LIMITS, seed=1000 + other)]
    for kind in KINDS:
        _, truth = gpu.samples([point for point in points if point.kind == kind], 0.0, 0)
        assert mean_error(table.curves[f"{kind}@all"], truth) <= MAX_ERROR, kind


@by_gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_attention_of_large_passes_is_not_made_up(gpu: SyntheticGpu, seed: int) -> None:
    """On a GPU rows x context cost next to nothing: as many flops as attention has, at the speed of matrices."""
    curve = profile(gpu, 0.03, seed).curves["verify@all"]
    model = gpu.target
    matrices = sum(inputs * outputs * count for inputs, outputs, count in model.matrices())
    attention = 2 * model.num_layers * model.num_heads * model.head_dim
    assert curve.per_row_context_ms <= 2.0 * attention / matrices * curve.tail_slope


@by_gpu
def test_contexts_twice_as_long_as_measured_are_still_within_reach(gpu: SyntheticGpu) -> None:
    table = profile(gpu, 0.01, 0)
    points = [replace(point, context_len=2 * LIMITS.main_context()) for point in held_out_points(LIMITS, seed=1000)]
    for kind in KINDS:
        _, truth = gpu.samples([point for point in points if point.kind == kind], 0.0, 0)
        assert mean_error(table.curves[f"{kind}@all"], truth) <= 2 * MAX_ERROR, kind


@by_gpu
@pytest.mark.parametrize("seed", range(3))
def test_a_whole_profile_is_better_still(gpu: SyntheticGpu, seed: int) -> None:
    table = profile(gpu, 0.01, seed, quick=False)
    assert max(table.held_out_errors.values()) <= 0.8 * MAX_ERROR
    assert not table.warnings
