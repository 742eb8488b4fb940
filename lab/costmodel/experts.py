"""Times of a layer's experts on a whole GPU, from NVIDIA's measured tables (data/experts.json, data/NOTICE).

ms = fixed + distinct experts x ms per expert + ms of rows beyond one per expert. The anchors are the experts of a few
models. Other sizes are interpolated between anchors of the same bytes per weight: bandwidth and the fixed part over the
logarithm of an expert's parameters; further rows are those of the nearest anchor.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from faser_trtllm.core.nnls import FloatArray
from lab.costmodel.gpu import GPUS, Gpu
from lab.costmodel.shape import SHAPES, ModelShape

ANCHORED = {
    "qwen3-30b-a3b": SHAPES["qwen3-30b-a3b"],
    "qwen3-30b-a3b-fp8": SHAPES["qwen3-30b-a3b"].in_fp8(),
    "mixtral-8x7b": SHAPES["mixtral-8x7b"],
    "mixtral-8x7b-fp8": SHAPES["mixtral-8x7b"].in_fp8(),
    "gpt-oss-20b": SHAPES["gpt-oss-20b"],
    "gpt-oss-120b": SHAPES["gpt-oss-120b"],
}
"""The anchors' models, by their names in the file."""
REFERENCE = "h100"  # its tables stand for a GPU without any


@dataclass(frozen=True)
class ExpertTimes:
    """Times of one layer's experts. more_ms: the time of rows beyond one per expert, at the points of `rows`.
    is_assumed: the times are scaled from a different GPU's tables."""

    fixed_ms: float
    expert_ms: float
    rows: FloatArray
    more_ms: FloatArray
    is_assumed: bool = False

    def ms(self, num_rows: float, num_experts: float, *, bandwidth: float = 1.0, sm_share: float = 1.0) -> float:
        """Return ms of num_rows rows with num_experts distinct experts, on shares of the bandwidth and the SMs."""
        rows, more_ms = self.rows, self.more_ms
        slope = (more_ms[-1] - more_ms[-2]) / (rows[-1] - rows[-2])
        more = np.interp(num_rows, rows, more_ms) + max(0.0, num_rows - rows[-1]) * slope
        return float(self.fixed_ms + num_experts * self.expert_ms / bandwidth + more / sm_share)


def expert_times(gpu: Gpu, shape: ModelShape) -> ExpertTimes:
    """Return the times of a mixture's experts; a GPU without tables uses REFERENCE's, scaled by bandwidth and flops."""
    assert shape.experts is not None, "a dense model has no experts"
    experts, found = shape.experts, load_experts()["gpus"].get(gpu.name, {})
    anchors = {ANCHORED[name]: times for name, times in found.items() if _bytes(ANCHORED[name]) == experts.value_bytes}
    if not anchors and gpu.name != REFERENCE:
        like = expert_times(GPUS[REFERENCE], shape)
        slower, weaker = GPUS[REFERENCE].gb_per_ms / gpu.gb_per_ms, GPUS[REFERENCE].tflops / gpu.tflops
        return ExpertTimes(like.fixed_ms, like.expert_ms * slower, like.rows, like.more_ms * weaker, is_assumed=True)
    ordered = sorted(anchors, key=lambda anchor: anchor.expert_params)
    sizes = np.log([anchor.expert_params for anchor in ordered])
    size, own_rows = np.log(shape.expert_params), _rows_per_expert(shape)
    gb_per_ms = [1e-9 * a.expert_params * _bytes(a) / anchors[a]["expert_ms"] for a in ordered]
    nearest = min(ordered, key=lambda a: (abs(np.log(a.expert_params) - size), abs(_rows_per_expert(a) - own_rows)))
    rows, more_ms = np.array(anchors[nearest]["more"], np.float64).T
    return ExpertTimes(
        float(np.interp(size, sizes, [anchors[a]["fixed_ms"] for a in ordered])),
        float(1e-9 * shape.expert_params * experts.value_bytes / np.interp(size, sizes, gb_per_ms)),
        rows * own_rows / _rows_per_expert(nearest),
        more_ms * _all_params(shape) / _all_params(nearest),
    )


@functools.lru_cache(maxsize=1)
def load_experts() -> Mapping[str, Any]:
    """Read the file: "source" in words, and by GPU and model "fixed_ms", "expert_ms" and "more" (rows, ms)."""
    found: dict[str, Any] = json.loads(resources.files("lab.costmodel").joinpath("data/experts.json").read_text())
    return found


def _bytes(shape: ModelShape) -> float:
    assert shape.experts is not None
    return shape.experts.value_bytes


def _rows_per_expert(shape: ModelShape) -> float:
    """Return the number of rows that give each expert one row."""
    assert shape.experts is not None
    return shape.experts.routing.num_experts / shape.experts.routing.top_k


def _all_params(shape: ModelShape) -> float:
    """Return the parameters of a layer's experts, to which the time of further rows is proportional."""
    assert shape.experts is not None
    return shape.experts.routing.num_experts * shape.expert_params
