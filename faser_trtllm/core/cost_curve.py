"""One curve of a cost table: stairs over rows plus slopes, and the fit of one to samples.

T(rows, requests, context) = stairs(rows) + per_request * requests + per_row_context * rows * context
+ per_request_context * requests * context (a request's cache is read once for all its rows), in ms: an additive model
whose stairs are measured at chosen row counts, kept non-decreasing, joined by straight lines (the kernels' tiles of 16
rows are steps with a slope, so the row counts around a tile's edge are measured) and continued with the last slope.
Context is the mean number of tokens that a row attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
ALL = "all"  # every core; the lanes of an overlapped step are "verify" and "draft"


@dataclass(frozen=True)
class CostSample:
    """One measured point: the median of several runs.

    kind: "verify" (a target pass), "decode" (one without drafting before it), "draft_step" (one autoregressive step,
    num_rows == num_requests), "draft_rows" (the draft model's catch-up rows), "segment:I" (segment I of the target, 0
    is the first), "exit:I" (candidate scores at boundary I).
    """

    kind: str
    num_rows: int
    num_requests: int
    context_len: int
    ms: float
    partition: str = ALL


@dataclass(frozen=True)
class CostCurve:
    """rows (ascending) and ms of the stairs; ms per request, per row and per request and token of context."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]
    per_request_ms: float = 0.0
    per_row_context_ms: float = 0.0
    per_request_context_ms: float = 0.0

    def at(self, num_rows: float, num_requests: float, context_len: float) -> float:
        rows, ms = self.rows, self.ms
        if num_rows > rows[-1] and len(rows) > 1:
            base = ms[-1] + (num_rows - rows[-1]) * self.tail_slope
        else:
            base = float(np.interp(num_rows, rows, ms))
        by_request = (self.per_request_ms + self.per_request_context_ms * context_len) * num_requests
        return base + by_request + self.per_row_context_ms * num_rows * context_len

    @property
    def tail_slope(self) -> float:
        """ms per row beyond the last measured cell: the slope over the last half of the range, not over one step."""
        first = int(np.searchsorted(self.rows, self.rows[-1] / 2))
        first = min(first, len(self.rows) - 2)
        return (self.ms[-1] - self.ms[first]) / (self.rows[-1] - self.rows[first])

    def over_rows(self, max_rows: int, num_requests: float, context_len: float) -> FloatArray:
        """ms [max_rows + 1] for 0, 1, ..., max_rows rows; zero rows cost nothing."""
        n = np.arange(max_rows + 1, dtype=np.float64)
        base = np.interp(n, self.rows, self.ms)
        if len(self.rows) > 1:
            base += np.maximum(n - self.rows[-1], 0.0) * self.tail_slope
        base += (self.per_request_ms + self.per_request_context_ms * context_len) * num_requests
        base += self.per_row_context_ms * context_len * n
        base[0] = 0.0
        return base


def fit_curve(samples: Sequence[CostSample]) -> CostCurve:
    """Least squares on relative errors: one unknown per row count, plus the slopes that the samples can identify."""
    rows = sorted({s.num_rows for s in samples})
    slopes = _slopes(samples, rows)
    residuals: dict[int, list[float]] = {n: [] for n in rows}
    for s in samples:
        residuals[s.num_rows].append(s.ms - sum(w * x for w, x in zip(slopes, _extras(s), strict=True)))
    stairs = isotonic([max(0.0, float(np.median(residuals[n]))) for n in rows], [len(residuals[n]) for n in rows])
    return CostCurve(tuple(rows), tuple(stairs), *slopes)


def _extras(s: CostSample) -> tuple[int, int, int]:
    """What the slopes multiply: requests, rows x context, requests x context."""
    return s.num_requests, s.num_rows * s.context_len, s.num_requests * s.context_len


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest non-decreasing sequence by weighted squares (pool adjacent violators); noise averages out, where a
    running maximum would keep its peaks."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        pool = (value, float(weight), 1)
        while pools and pools[-1][0] > pool[0]:
            mean, w, n = pools.pop()
            pool = ((mean * w + pool[0] * pool[1]) / (w + pool[1]), w + pool[1], n + pool[2])
        pools.append(pool)
    return [mean for mean, _, n in pools for _ in range(n)]


def _slopes(samples: Sequence[CostSample], rows: Sequence[int]) -> tuple[float, float, float]:
    index = {n: i for i, n in enumerate(rows)}
    one_per_row = all(s.num_requests == s.num_rows for s in samples)  # requests and rows are the same thing here
    by_requests, by_context = not one_per_row and _varies(samples, "num_requests"), _varies(samples, "context_len")
    columns = [by_requests, by_context, by_requests and by_context]
    while any(columns):
        design = np.zeros((len(samples), len(rows) + sum(columns)))
        for i, s in enumerate(samples):
            design[i, index[s.num_rows]] = 1.0
            extra = [x for x, used in zip(_extras(s), columns, strict=True) if used]
            design[i, len(rows) :] = extra
        ms = np.array([s.ms for s in samples])
        scale = np.abs(design).max(axis=0)
        solution = np.linalg.lstsq(design / scale / ms[:, None], np.ones(len(samples)), rcond=None)[0] / scale
        fitted = iter(solution[len(rows) :].tolist())
        slopes = [next(fitted) if used else 0.0 for used in columns]
        if min(slopes) >= 0.0:
            return slopes[0], slopes[1], slopes[2]
        # a negative slope is noise
        columns = [used and slope >= 0.0 for used, slope in zip(columns, slopes, strict=True)]
    return 0.0, 0.0, 0.0


def _varies(samples: Sequence[CostSample], name: str) -> bool:
    """Whether some row count was measured at more than one value, so that the slope can be separated from the
    stairs."""
    seen: dict[int, set[int]] = {}
    for s in samples:
        seen.setdefault(s.num_rows, set()).add(getattr(s, name))
    return any(len(values) > 1 for values in seen.values())
