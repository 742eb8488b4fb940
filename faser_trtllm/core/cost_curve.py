"""One curve of a cost table: stairs over rows plus slopes, and the fit of one to samples.

T(rows, requests, context) = stairs(rows) + per_request * requests + per_row_context * rows * context
+ per_request_context * requests * context (a request's cache is read once for all its rows) + per_context * context (a
small pass of a GPU waits for the block that walks a context) + per_expert * distinct experts of a layer (weights of a
mixture that the rows read), in ms: an additive model whose stairs are measured at chosen row counts, never fall, are
joined by straight lines (the kernels' tiles of 16 rows are steps with a slope, so the row counts around a tile's edge
are measured) and continued with the last slope. An engine that pads its passes runs stairs of its own: rows count as
the size that they are padded to. Context is the mean number of tokens that a row attends to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from faser_trtllm.core.nnls import FloatArray, nnls

RIDGE = (0.02, 0.1, 0.02, 0.02)  # weight of 0 for each slope's part of the largest pass, in mean passes
EXPERT_RIDGE = 0.02  # the same of the slope over experts
LATENCY_REACH = 2.0  # times the longest measured context, where attention has split it among blocks, at a guess
CONTEXTS_DIFFER = 1.5  # the longest over the shortest, from which on slopes over context can be told
MAX_SAMPLES = 512  # of a file; a full profile has some 170
_MAX_NUMBER = 10**9  # of rows, tokens and ms
_NEWER_SLOPES = ("per_request_context_ms", "per_context_ms", "context_limit", "per_expert_ms")
Number = TypeVar("Number", int, float)
ALL = "all"  # every core; the streams of an overlapped step run on "verify" and "draft"


@dataclass(frozen=True)
class CostSample:
    """One measured point: the median of several runs.

    kind: "verify" (a target pass), "decode" (one without drafting before it), "draft_step" (one autoregressive step,
    num_rows == num_requests), "draft_rows" (the draft model's catch-up rows), "draft_block" (a block drafter's, with
    its pass over the blocks; its "draft_step" is a further draft of a block), "segment:I" (segment I of the target, 0
    is the first), "exit:I" (candidate scores at boundary I). num_experts: distinct experts of a layer whose weights the
    pass read, the mean over layers; 0: a model without experts.
    """

    kind: str
    num_rows: int
    num_requests: int
    context_len: int
    ms: float
    partition: str = ALL
    num_experts: float = 0.0

    @property
    def curve(self) -> str:
        """The key of the curve that it belongs to."""
        return f"{self.kind}@{self.partition}"


def read_samples(items: Sequence[Mapping[str, Any]]) -> list[CostSample]:
    """Samples from their JSON, unknown keys ignored; KeyError, TypeError or ValueError if they are none."""
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
    """A curve from its JSON; KeyError, TypeError or ValueError if it is none. Old files lack the newer slopes."""
    rows, sizes = ([_checked("rows", int(n)) for n in item.get(name, ())] for name in ("rows", "sizes"))
    ms = [_checked("ms", float(t)) for t in item["ms"]]
    if not rows or len(rows) != len(ms) or any(a >= b for each in (rows, sizes) for a, b in pairwise(each)):
        raise ValueError(f"a curve of {len(ms)} times for {len(rows)} row counts, which must rise")
    slopes = {name: _checked(name, float(item[name])) for name in ("per_request_ms", "per_row_context_ms")}
    slopes |= {name: _checked(name, float(item.get(name, 0.0))) for name in _NEWER_SLOPES}
    return CostCurve(tuple(rows), tuple(ms), **slopes, sizes=tuple(sizes))


def _checked(what: str, number: Number, least: float = 0) -> Number:
    if not least <= number <= _MAX_NUMBER:
        raise ValueError(f"{number!r:.40} {what}, it must be {least} to {_MAX_NUMBER}")
    return number


@dataclass(frozen=True)
class CostCurve:
    """rows (ascending) and ms of the stairs; ms per request, per row and token of context, per request and token of
    context, and per token of context up to context_limit, however many requests have it. sizes (ascending): what passes
    are padded to; larger ones, and all where there are none, run as they are. per_expert_ms: per distinct expert of a
    layer that a pass reads, all layers together."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]
    per_request_ms: float = 0.0
    per_row_context_ms: float = 0.0
    per_request_context_ms: float = 0.0
    per_context_ms: float = 0.0
    context_limit: float = 0.0
    sizes: tuple[int, ...] = ()
    per_expert_ms: float = 0.0

    def at(self, num_rows: float, num_requests: float, context_len: float, num_experts: float = 0.0) -> float:
        rows, ms = self.rows, self.ms
        size = float(pad(np.array([num_rows]), self.sizes)[0])
        if size > rows[-1] and len(rows) > 1:
            base = ms[-1] + (size - rows[-1]) * self.tail_slope
        else:
            base = float(np.interp(size, rows, ms))
        by_request = self.request_ms(context_len) * num_requests
        by_row = self.per_row_context_ms * num_rows * context_len
        return base + by_request + by_row + self._latency_ms(context_len) + self.per_expert_ms * num_experts

    def request_ms(self, context_len: float) -> float:
        """Of one request more with as many rows."""
        return self.per_request_ms + self.per_request_context_ms * context_len

    def _latency_ms(self, context_len: float) -> float:
        return self.per_context_ms * min(context_len, self.context_limit)

    @property
    def tail_slope(self) -> float:
        """ms per row beyond the last measured cell: the slope over the last half of the range, not over one step."""
        first = int(np.searchsorted(self.rows, self.rows[-1] / 2))
        first = min(first, len(self.rows) - 2)
        return (self.ms[-1] - self.ms[first]) / (self.rows[-1] - self.rows[first])

    def over_rows(self, max_rows: int, num_requests: float, context_len: float) -> FloatArray:
        """ms [max_rows + 1] for 0, 1, ..., max_rows rows, without experts; zero rows cost nothing."""
        n = np.arange(max_rows + 1, dtype=np.float64)
        sizes = pad(n, self.sizes)
        base = np.interp(sizes, self.rows, self.ms)
        if len(self.rows) > 1:
            base += np.maximum(sizes - self.rows[-1], 0.0) * self.tail_slope
        base += self.request_ms(context_len) * num_requests + self._latency_ms(context_len)
        base += self.per_row_context_ms * context_len * n
        base[0] = 0.0
        return base


def pad(num_rows: FloatArray, sizes: Sequence[int]) -> FloatArray:
    """The smallest of the sizes that holds as many rows; as they are where there is none."""
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
    """Least squares on relative errors, of the stairs' increments and the slopes at once, none of them negative.

    A slope that few samples can tell from the stairs, or from another slope, is drawn to 0 (RIDGE). slopes: without
    them, stairs alone, and experts. sizes: as the curve has them. per_expert_ms: if it is known from elsewhere.
    """
    n, requests, context, experts, ms = np.array(
        [(s.num_rows, s.num_requests, s.context_len, s.num_experts, s.ms) for s in samples], np.float64
    ).T
    size = pad(n, sizes)
    rows = np.unique(size)
    extras = np.column_stack([requests, n * context, requests * context, context])
    if context.max() < CONTEXTS_DIFFER * context.min():
        extras[:, 1:] = 0.0  # the rows of one request more make its context a little longer, which tells nothing
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
    stairs, found_slopes = np.split(found / scale, [rows.size])
    per_request, per_row_context, per_request_context, per_context, *per_expert = found_slopes.tolist()
    return CostCurve(
        tuple(map(int, rows)),
        tuple(np.cumsum(stairs).tolist()),
        per_request,
        per_row_context,
        per_request_context,
        per_context,
        LATENCY_REACH * float(context.max()),
        sizes,
        per_expert[0] if per_expert else per_expert_ms or 0.0,
    )
