"""One curve of a cost table, a step function of the rows plus slopes, and its fit to samples.

T = base(rows) + per_request * requests + per_row_context * rows * context + per_request_context * requests * context
  + per_context * context + per_expert * experts, in ms.

- base is measured at chosen row counts, never falls, is interpolated linearly and continued with the last slope.
  Kernels work on tiles of 16 rows, so the row counts around a tile's edge are measured. An engine that pads its passes
  has steps of its own: rows count as the size they are padded to.
- context is the mean number of tokens that a row attends to.
- per_request_context: a request's KV cache is read once for all its rows.
- per_context: a small pass on a GPU waits for the thread block that walks the context.
- experts: the distinct experts of a layer whose weights a mixture-of-experts pass reads.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from faser_trtllm.core.nnls import FloatArray, nnls

RIDGE = (0.02, 0.1, 0.02, 0.02)  # pull of each slope to 0: weight of its ms in the largest pass over the mean pass
EXPERT_RIDGE = 0.02  # the same for the slope over experts
LATENCY_REACH = 2.0  # estimate: attention splits contexts over blocks from this many times the longest measured context
CONTEXTS_DIFFER = 1.5  # minimum ratio of the longest to the shortest context for fitting slopes over context
MAX_SAMPLES = 512  # of a file; a full profile has some 170
_MAX_NUMBER = 10**9  # of rows, tokens and ms
_SLOPES = (
    *("per_request_ms", "per_row_context_ms", "per_request_context_ms", "per_context_ms"),
    *("context_limit", "per_expert_ms"),
)
Number = TypeVar("Number", int, float)
ALL = "all"  # the partition of every core; the streams of an overlapped step run on "verify" and "draft"


@dataclass(frozen=True)
class CostSample:
    """One measured point: the median of several runs.

    Kinds:
        verify: a target pass. decode: a target pass without drafting before it.
        draft_step: one autoregressive step of the draft model, num_rows == num_requests.
        draft_rows: the draft model's pass over committed tokens that it has not seen.
        draft_block: the same for a block drafter, with its pass over the blocks; its draft_step is one more draft of a
            block.
        segment:I: segment I of the target, from 0. exit:I: scoring candidates at boundary I.
    """

    kind: str
    num_rows: int
    num_requests: int
    context_len: int
    ms: float
    partition: str = ALL
    num_experts: float = 0.0  # distinct experts whose weights the pass read, the mean over layers; 0 without experts

    @property
    def curve(self) -> str:
        """The key of the curve that this sample belongs to."""
        return f"{self.kind}@{self.partition}"


def read_samples(items: Sequence[Mapping[str, Any]]) -> list[CostSample]:
    """Parse samples from JSON, ignoring unknown keys; raise KeyError, TypeError or ValueError if they are invalid."""
    if len(items) > MAX_SAMPLES:
        raise ValueError(f"{len(items)} samples, at most {MAX_SAMPLES} are read")
    return [
        CostSample(
            str(item["kind"]),
            _checked("rows", int(item["num_rows"]), 1),
            _checked("requests", int(item["num_requests"])),
            _checked("tokens of context", int(item["context_len"])),
            _checked("ms", float(item["ms"]), 1e-9),
            str(item.get("partition", ALL)),
            _checked("experts", float(item.get("num_experts", 0.0))),
        )
        for item in items
    ]


def read_curve(item: Mapping[str, Any]) -> CostCurve:
    """Parse a curve from JSON; raise KeyError, TypeError or ValueError if invalid."""
    rows, sizes = ([_checked("rows", int(n)) for n in item.get(name, ())] for name in ("rows", "sizes"))
    ms = [_checked("ms", float(t)) for t in item["ms"]]
    if not rows or len(rows) != len(ms) or any(a >= b for each in (rows, sizes) for a, b in pairwise(each)):
        raise ValueError(f"a curve of {len(ms)} times for {len(rows)} row counts, which must rise")
    slopes = {name: _checked(name, float(item[name])) for name in _SLOPES}
    return CostCurve(tuple(rows), tuple(ms), **slopes, sizes=tuple(sizes))


def _checked(what: str, number: Number, least: float = 0) -> Number:
    if not least <= number <= _MAX_NUMBER:
        raise ValueError(f"{number!r:.40} {what}; it must be {least} to {_MAX_NUMBER}")
    return number


@dataclass(frozen=True)
class CostCurve:
    """The parameters of one curve; see the module for the formula."""

    rows: tuple[int, ...]  # row counts of the base, ascending
    ms: tuple[float, ...]  # base at these row counts
    per_request_ms: float = 0.0
    per_row_context_ms: float = 0.0
    per_request_context_ms: float = 0.0
    per_context_ms: float = 0.0  # independent of the number of requests, up to context_limit
    context_limit: float = 0.0
    sizes: tuple[int, ...] = ()  # sizes that passes are padded to, ascending; larger passes run as they are
    per_expert_ms: float = 0.0  # per distinct expert of a layer, for all layers together

    def at(self, num_rows: float, num_requests: float, context_len: float, num_experts: float = 0.0) -> float:
        """Return the ms of a pass; num_experts: distinct experts of a layer that it reads."""
        rows, ms, sizes = self.rows, self.ms, self.sizes
        place = bisect_left(sizes, num_rows)
        size = sizes[place] if place < len(sizes) else num_rows
        base = interpolate(size, rows, ms)
        if size > rows[-1] and len(rows) > 1:
            base += (size - rows[-1]) * self.tail_slope
        by_request = self.request_ms(context_len) * num_requests
        by_row = self.per_row_context_ms * num_rows * context_len
        return base + by_request + by_row + self._latency_ms(context_len) + self.per_expert_ms * num_experts

    def request_ms(self, context_len: float) -> float:
        """Return the ms that one more request adds to a pass of the same number of rows."""
        return self.per_request_ms + self.per_request_context_ms * context_len

    def _latency_ms(self, context_len: float) -> float:
        return self.per_context_ms * min(context_len, self.context_limit)

    @functools.cached_property
    def tail_slope(self) -> float:
        """ms per row beyond the last measured row count: the slope over the last half of the range."""
        first = min(bisect_left(self.rows, self.rows[-1] / 2), len(self.rows) - 2)
        return (self.ms[-1] - self.ms[first]) / (self.rows[-1] - self.rows[first])

    def base_ms(self, max_rows: int) -> FloatArray:
        """Return the base [max_rows + 1] for 0, 1, ..., max_rows rows."""
        sizes = pad(np.arange(max_rows + 1, dtype=np.float64), self.sizes)
        base: FloatArray = np.interp(sizes, self.rows, self.ms)
        if len(self.rows) > 1:
            base += np.maximum(sizes - self.rows[-1], 0.0) * self.tail_slope
        return base

    def over_rows(self, base: FloatArray, num_requests: float, context_len: float) -> FloatArray:
        """Return ms for the rows of base_ms(), without experts; zero rows cost nothing."""
        ms = base + (self.request_ms(context_len) * num_requests + self._latency_ms(context_len))
        if self.per_row_context_ms:
            ms += self.per_row_context_ms * context_len * np.arange(base.size)
        ms[0] = 0.0
        return ms


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Interpolate linearly at one number, for which np.interp takes ten times as long."""
    place = bisect_right(xs, x)
    if place == 0 or place == len(xs):
        return ys[max(0, place - 1)]
    left, right = place - 1, place
    return (ys[right] - ys[left]) / (xs[right] - xs[left]) * (x - xs[left]) + ys[left]


def pad(num_rows: FloatArray, sizes: Sequence[int]) -> FloatArray:
    """Round each number of rows up to the next size; numbers above the largest size stay as they are."""
    if not sizes:
        return num_rows
    places = np.searchsorted(sizes, num_rows)
    padded: FloatArray = np.where(places < len(sizes), np.array([*sizes, 0])[places], num_rows)
    return padded


def fit_curve(
    samples: Sequence[CostSample],
    *,
    slopes: bool = True,
    sizes: tuple[int, ...] = (),
    per_expert_ms: float | None = None,
) -> CostCurve:
    """Fit the increments of the base and the slopes together: non-negative least squares on relative errors.

    A slope that few samples can tell from the base or from another slope is drawn to 0 (RIDGE). slopes: if False, fit
    only the base and experts. sizes: of CostCurve. per_expert_ms: a known value, which is then not fitted.
    """
    n, requests, context, experts, ms = np.array(
        [(s.num_rows, s.num_requests, s.context_len, s.num_experts, s.ms) for s in samples], np.float64
    ).T
    size = pad(n, sizes)
    rows = np.unique(size)
    extras = np.column_stack([requests, n * context, requests * context, context])
    if context.max() < CONTEXTS_DIFFER * context.min():
        extras[:, 1:] = 0.0  # one more request makes its rows' context a little longer, which is no information
    ridges: tuple[float, ...] = RIDGE
    if not slopes:
        extras = np.zeros_like(extras)
    if per_expert_ms is None and experts.any():
        extras, ridges = np.column_stack([extras, experts]), (*RIDGE, EXPERT_RIDGE)
    design = np.column_stack([size[:, None] >= rows, extras])
    scale = design.max(axis=0)
    scale[scale == 0.0] = 1.0
    ridge = np.zeros((len(ridges), scale.size))
    ridge[:, rows.size :] = np.diag(ridges) / ms.mean()
    rest_ms = ms - (per_expert_ms or 0.0) * experts
    target = np.concatenate([rest_ms / ms, np.zeros(len(ridges))])
    found = nnls(np.vstack([design / scale / ms[:, None], ridge]), target)
    base, found_slopes = np.split(found / scale, [rows.size])
    per_request, per_row_context, per_request_context, per_context, *per_expert = found_slopes.tolist()
    return CostCurve(
        tuple(map(int, rows)),
        tuple(np.cumsum(base).tolist()),
        per_request,
        per_row_context,
        per_request_context,
        per_context,
        LATENCY_REACH * float(context.max()),
        sizes,
        per_expert[0] if per_expert else per_expert_ms or 0.0,
    )
