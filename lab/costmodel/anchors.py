"""Operator times by size on a whole GPU, from NVIDIA's measured tables (data/anchors.json, data/NOTICE).

The anchors are operators of eleven models. Times of a layer's matrices, an LM head or a layer's attention are
interpolated between them by size: parameters per GPU, or bytes of a token's cache, both on logarithmic scales.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.nnls import nnls
from lab.costmodel.gpu import Gpu
from lab.costmodel.shape import SHAPES, ModelShape

Array = npt.NDArray[np.float64]

SAME_SIZE = 0.01  # anchors whose sizes differ by less are averaged
TAIL_POINTS = 8  # last row counts, whose mean slope extrapolates

ANCHORED = {
    "llama-2-13b": SHAPES["llama-2-13b"],
    "llama-3.1-8b": SHAPES["llama-3.1-8b"],
    "llama-3.2-1b": SHAPES["llama-3.2-1b"],
    "llama-3.3-70b-tp4": SHAPES["llama-3.3-70b"].on(4),
    "llama-3.3-70b-tp4-fp8": SHAPES["llama-3.3-70b"].on(4).in_fp8(),
    "qwen3-0.6b": SHAPES["qwen3-0.6b"],
    "qwen3-8b": SHAPES["qwen3-8b"],
    "qwen3-32b": SHAPES["qwen3-32b"],
    "qwen3-32b-fp8": SHAPES["qwen3-32b"].in_fp8(),
    "eagle3-8b": SHAPES["llama-3.1-8b"].eagle3(),
    "eagle3-70b": SHAPES["llama-3.3-70b"].eagle3(),
}
"""The anchors' models, by their names in the file."""
_SHARDED = "llama-3.3-70b-tp4"  # its all-reduces stand for those of all models


@dataclass(frozen=True)
class BySize:
    """Times [num_sizes, ...] of one operator at ascending sizes."""

    sizes: Array
    ms: Array

    @staticmethod
    def of(points: Sequence[tuple[float, Array]]) -> BySize:
        """Return the points sorted by size, with points of equal size averaged."""
        groups: list[list[tuple[float, Array]]] = []
        for point in sorted(points, key=lambda point: point[0]):
            if groups and point[0] < (1.0 + SAME_SIZE) * groups[-1][0][0]:
                groups[-1].append(point)
            else:
                groups.append([point])
        sizes = [float(np.mean([size for size, _ in group])) for group in groups]
        return BySize(np.array(sizes), np.array([np.mean([ms for _, ms in group], axis=0) for group in groups]))

    def at(self, size: float) -> Array:
        """Interpolate between logarithms; beyond the ends times are proportional to the size."""
        sizes, ms = self.sizes, self.ms
        if size <= sizes[0] or size >= sizes[-1]:
            end = 0 if size <= sizes[0] else -1
            return np.asarray(ms[end] * (size / sizes[end]))
        right = int(np.searchsorted(sizes, size))
        weight = np.log(size / sizes[right - 1]) / np.log(sizes[right] / sizes[right - 1])
        return np.asarray(np.exp((1.0 - weight) * np.log(ms[right - 1]) + weight * np.log(ms[right])))


@dataclass(frozen=True)
class OperatorTimes:
    """Times of one model on a whole GPU, in ms, by rows; gemm: all layers' matrices.

    attention [batch, context] is for one row per request.
    """

    rows: Array
    gemm: Array
    head: Array
    elementwise: Array
    all_reduce: Array
    batch: Array
    contexts: Array
    attention: Array

    def by_rows(self, what: Array, num_rows: float) -> float:
        """Interpolate `what`, one of the arrays by rows, at a number of rows."""
        return _between(self.rows, what, num_rows)

    def attention_ms(self, num_requests: float, context_len: float) -> float:
        """Interpolate linearly. Beyond the largest sizes, times are proportional to requests or context."""
        beyond = max(1.0, num_requests / self.batch[-1]) * max(1.0, context_len / self.contexts[-1])
        by_context = [np.interp(num_requests, self.batch, column) for column in self.attention.T]
        return float(beyond * np.interp(context_len, self.contexts, by_context))


class Anchors:
    """Operator times of a GPU by size."""

    def __init__(self, gpu: Gpu) -> None:
        data = load_anchors()
        self._rows, self._batch, self._contexts = (np.array(data[key], float) for key in ("rows", "batch", "ctx"))
        self._found = {ANCHORED[name]: values for name, values in data["gpus"][gpu.name].items()}
        self._heads = self._by_size("lm", lambda shape: shape.head_params, lambda shape: 1)
        self._sharded = ANCHORED[_SHARDED], np.array(data["gpus"][gpu.name][_SHARDED]["ar"])

    def times(self, shape: ModelShape) -> OperatorTimes:
        """Return a model's times, interpolated between anchors of the same types of weights and cache."""
        gemms = self._by_size(
            "gemm", lambda s: s.layer_params, lambda s: s.num_layers, lambda s: s.weight_bytes == shape.weight_bytes
        )
        attention = self._by_size(
            "attention", lambda s: s.layer_kv_bytes, lambda s: s.num_layers, lambda s: s.kv_bytes == shape.kv_bytes
        )
        return OperatorTimes(
            self._rows,
            _rising(shape.num_layers * gemms.at(shape.layer_params)),
            _rising(self._heads.at(shape.head_params)),
            self._elementwise(shape),
            self._all_reduce(shape),
            self._batch,
            self._contexts,
            shape.num_layers * attention.at(shape.layer_kv_bytes),
        )

    def _by_size(
        self,
        key: str,
        size: Callable[[ModelShape], float],
        count: Callable[[ModelShape], int],
        fits: Callable[[ModelShape], bool] = lambda shape: True,
    ) -> BySize:
        return BySize.of(
            [(size(shape), np.array(v[key]) / count(shape)) for shape, v in self._found.items() if fits(shape)]
        )

    def _elementwise(self, shape: ModelShape) -> Array:
        """Return the elementwise times of a shape, from a linear fit of _kernel_sizes to all anchors."""
        shapes = list(self._found)
        design = np.concatenate([self._kernel_sizes(s) for s in shapes])
        ms = np.concatenate([self._found[s]["elem"] for s in shapes])
        weights = 1.0 / ms
        scale = np.abs(design).max(axis=0)
        found = np.linalg.lstsq(design / scale * weights[:, None], ms * weights, rcond=None)[0] / scale
        return np.asarray(self._kernel_sizes(shape) @ found)

    def _kernel_sizes(self, shape: ModelShape) -> Array:
        """Return [rows, 5]: floor, rows x hidden, rows x intermediate size of all layers; floor, rows x hidden once."""
        layers, rows = shape.num_layers, self._rows
        hidden, intermediate = rows * shape.hidden_size, rows * shape.intermediate_size / shape.num_gpus
        return np.stack(
            [np.full(rows.size, layers), layers * hidden, layers * intermediate, np.ones(rows.size), hidden], axis=1
        )

    def _all_reduce(self, shape: ModelShape) -> Array:
        """Return the times of two all-reduces per layer, by their bytes."""
        if shape.num_gpus == 1:
            return np.zeros(self._rows.size)
        like, ms = self._sharded
        each = shape.num_layers / like.num_layers * ms
        return np.array([_between(self._rows, each, n * shape.hidden_size / like.hidden_size) for n in self._rows])


@functools.lru_cache(maxsize=1)
def load_anchors() -> Mapping[str, Any]:
    """Read the file: "source" in words, the grids "rows", "batch" and "ctx", and times by GPU and model."""
    text = resources.files("lab.costmodel").joinpath("data/anchors.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def anchors_version() -> str:
    """Return the source of the anchors, with its version."""
    return str(load_anchors()["source"])


def _between(rows: Array, ms: Array, num_rows: float) -> float:
    """Interpolate linearly between rows, and extrapolate with the mean slope of the last ones."""
    if num_rows <= rows[-1]:
        return float(np.interp(num_rows, rows, ms))
    slope = (ms[-1] - ms[-TAIL_POINTS]) / (rows[-1] - rows[-TAIL_POINTS])
    return float(ms[-1] + (num_rows - rows[-1]) * slope)


def _rising(ms: Array) -> Array:
    """Make times non-decreasing in rows; decreases are noise."""
    return np.cumsum(nnls(np.tril(np.ones((ms.size, ms.size))), ms))
