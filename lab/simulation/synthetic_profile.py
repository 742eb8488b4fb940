"""A synthetic profile, whose points have the times of a MeasuredGpu with noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from faser_trtllm.core.cost_table import ALL, CostSample, CostTable, Fingerprint
from faser_trtllm.profiling.grid import Limits, Point
from faser_trtllm.profiling.measure import sample_of
from faser_trtllm.profiling.options import ProfileOptions
from faser_trtllm.profiling.probe import largest_context
from faser_trtllm.profiling.profile import grid
from lab.costmodel.measured import MeasuredGpu

LIMITS = Limits(max_rows=1280, max_num_requests=256, max_context=0, max_draft_len=8)


def synthetic_profile(gpu: MeasuredGpu, *, quick: bool = True, noise: float = 0.0, seed: int = 0) -> CostTable:
    """Return the cost table that `faser profile` would make of this GPU.

    noise: standard deviation of the log of every point's time.
    """
    rng = np.random.default_rng(seed)
    options = ProfileOptions(Path(), quick=quick)
    limits = Limits(LIMITS.max_rows, LIMITS.max_num_requests, largest_context(quick), LIMITS.max_draft_len)
    samples: list[CostSample] = []
    held_out: list[CostSample] = []
    for point in grid(limits, (ALL,), options):
        sample = sample_of(point, 0.0)
        ms = _time_ms(gpu, point, sample.context_len) * float(np.exp(rng.normal(0.0, noise)))
        (held_out if point.held_out else samples).append(sample_of(point, ms))
    fingerprint = Fingerprint(gpu.name, "sm_90", 132, "")
    return CostTable.fit(samples, fingerprint, held_out=held_out, quick=quick, sizes=gpu.row_sizes)


def _time_ms(gpu: MeasuredGpu, point: Point, context_len: float) -> float:
    rows, requests = point.num_rows, point.num_requests
    if point.kind == "draft_step":
        return gpu.draft_step_ms(requests, context_len)
    if point.kind == "draft_rows":
        return gpu.draft_rows_ms(rows, requests, context_len)
    return gpu.verify_ms(rows, requests, context_len) + float(gpu.data["probe_ms"]["ms"])
