"""Costs of draft calls: the table's first and further steps, each corrected by a learnt factor.

Only whole calls are timed. Calls of different lengths separate the two kinds of steps; until there are any, the
correction goes to the kind that should have taken most of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from faser_trtllm.core.cost_curve import interpolate
from faser_trtllm.core.cost_table import ALL, CostTable
from faser_trtllm.ops.arrays import Float64Array
from faser_trtllm.policy.average import Average
from faser_trtllm.policy.base import PlanStats

ERROR_MS = 20_000.0  # averaging window of the factors, in ms of draft calls
PRIOR_MS = 5.0  # weight of the table, in ms of draft calls
KNOWN_MS = 50.0  # ms of draft calls after which the factors are known
MOST = 30.0  # limit on the factors
FIRST_ROWS = 1.8  # per request, in a draft model's first step: one token was missed, or two if all were accepted
MOST_FIRST_ROWS = 2.0  # per request, next to prompts: calls with more rows also run prompts
LATE_ROWS = 64  # difference in rows over which the cost per missed token is taken from the table


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected time of a plan's draft calls, at the machine's usual speed."""

    ms: float
    is_known: bool  # the factors are known


class Factors:
    """Least squares of first * x + further * y = 1 over calls, with the expected shares x and y of their time."""

    def __init__(self, first: float = 1.0, further: float = 1.0) -> None:
        """first, further: the factors assumed before there are measurements."""
        self.weight = PRIOR_MS
        self.values = self._prior = first, further
        self._squares = (PRIOR_MS, PRIOR_MS)  # sums of x * x and y * y
        self._product = 0.0  # sum of x * y
        self._sums = (PRIOR_MS * first, PRIOR_MS * further)

    def add(self, first_share: float, further_share: float, weight_ms: float) -> None:
        keep = max(0.0, 1.0 - weight_ms / ERROR_MS)
        x, y, prior_ms = min(first_share, MOST), min(further_share, MOST), (1.0 - keep) * PRIOR_MS
        xx, yy = (keep * old + prior_ms + weight_ms * z * z for old, z in zip(self._squares, (x, y), strict=True))
        xy = keep * self._product + weight_ms * x * y
        (sum_x, sum_y), (first, further) = self._sums, self._prior
        sum_x = keep * sum_x + prior_ms * first + weight_ms * x
        sum_y = keep * sum_y + prior_ms * further + weight_ms * y
        self._squares, self._product, self._sums = (xx, yy), xy, (sum_x, sum_y)
        self.weight = min(self.weight + weight_ms, ERROR_MS)
        determinant = xx * yy - xy * xy
        found = (yy * sum_x - xy * sum_y) / determinant, (xx * sum_y - xy * sum_x) / determinant
        self.values = min(max(found[0], 1.0 / MOST), MOST), min(max(found[1], 1.0 / MOST), MOST)


class DraftCosts:
    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._factors: dict[int, Factors] = {}  # by log2 of the requests that draft
        self._first_rows = Average(ERROR_MS, PRIOR_MS, FIRST_ROWS)  # per request; many for heads and blocks
        self._late_ms, self._late_rows = 0.0, 0.0  # of passes over missed tokens, in addition to their calls

    def expect(self, stats: PlanStats, context_len: float) -> Expected | None:
        """Return the expected time, or None if no calls were timed or they also ran missed tokens."""
        parts = self._parts(stats, context_len)
        with_prompts = stats.num_context_rows and stats.num_draft_rows > MOST_FIRST_ROWS * stats.num_requests
        if parts is None or with_prompts:
            return None
        drafting, first_ms, further_ms = parts
        factors = self._factors.get(_octave(drafting))
        first, further = self._at(drafting)
        return Expected(first * first_ms + further * further_ms, factors is not None and factors.weight >= KNOWN_MS)

    def observe(self, stats: PlanStats, context_len: float, slowness: float) -> None:
        """Learn from the calls of a plan. slowness: see MeasuredCosts."""
        self._observe_late(stats, context_len, slowness)
        parts = self._parts(stats, context_len)
        if parts is None:
            return
        drafting, first_ms, further_ms = parts
        usual_ms = stats.draft_ms / slowness
        factors = self._factors.setdefault(_octave(drafting), Factors(*self._at(drafting)))
        factors.add(first_ms / usual_ms, further_ms / usual_ms, usual_ms)
        if not stats.num_context_rows:
            self._first_rows.add(max(FIRST_ROWS, stats.num_draft_rows / stats.num_requests), usual_ms)

    def late_row_ms(self, num_requests: int) -> float:
        """See MeasuredCosts. The result is measured; the table is a prior with the weight of LATE_ROWS rows."""
        rows = round(FIRST_ROWS * num_requests)
        few_ms, many_ms = (self._table.draft_rows_ms(rows + more, num_requests, LATE_ROWS) for more in (0, LATE_ROWS))
        prior_ms = max(0.0, many_ms - few_ms) * self._at(num_requests)[0]
        return (prior_ms + self._late_ms) / (LATE_ROWS + self._late_rows)

    def arrays(self, num_requests: int, context_len: float) -> tuple[Float64Array, Float64Array]:
        """Return ms of a first and of a further step for 0 to num_requests requests; zeros without a draft model."""
        if not self._table.has("draft_step"):
            return np.zeros(num_requests + 1), np.zeros(num_requests + 1)
        first, further = self._table_arrays(num_requests, context_len)
        known = sorted(self._factors)
        if not known:
            return first, further
        octaves = np.log2(np.maximum(np.arange(num_requests + 1.0), 1.0))
        factors = [np.interp(octaves, known, [self._factors[k].values[i] for k in known]) for i in range(2)]
        return factors[0] * first, factors[1] * further

    def _table_arrays(self, n: int, context_len: float) -> tuple[Float64Array, Float64Array]:
        first = self._table.draft_first_ms_array(n, self._first_rows.mean, context_len, ALL)
        return first, self._table.draft_step_ms_array(n, context_len, ALL)

    def _parts(self, stats: PlanStats, context_len: float) -> tuple[float, float, float] | None:
        """Return the requests per step of the calls, and the table's ms of all first and of all further steps."""
        calls = stats.num_draft_calls
        if not stats.num_drafted or stats.draft_ms <= 0.0:  # a broken draft model may have returned none
            return None
        drafting = stats.num_drafted / stats.num_draft_steps
        first_ms = self._table.draft_rows_ms(stats.num_draft_rows / calls, drafting, context_len)  # type: ignore[arg-type]
        further_ms = self._table.draft_step_ms(drafting, context_len)  # type: ignore[arg-type]
        return drafting, calls * first_ms, (stats.num_draft_steps - calls) * further_ms

    def _observe_late(self, stats: PlanStats, context_len: float, slowness: float) -> None:
        """Learn the time of calls over missed tokens, beyond that of the same calls without these."""
        if not stats.num_late_calls or stats.late_ms <= 0.0:
            return
        calls, drafting = stats.num_late_calls, stats.num_late_drafted / stats.num_late_steps
        first, further = self._at(drafting)
        usual_rows = self._first_rows.mean * drafting
        first_ms = first * self._table.draft_rows_ms(usual_rows, drafting, context_len)  # type: ignore[arg-type]
        further_ms = further * self._table.draft_step_ms(drafting, context_len)  # type: ignore[arg-type]
        usual_ms = calls * first_ms + (stats.num_late_steps - calls) * further_ms
        keep = max(0.0, 1.0 - stats.late_ms / ERROR_MS)
        self._late_ms = keep * self._late_ms + max(0.0, stats.late_ms / slowness - usual_ms)
        self._late_rows = keep * self._late_rows + max(0.0, stats.num_late_rows - calls * usual_rows)

    def _at(self, num_requests: float) -> tuple[float, float]:
        known = sorted(self._factors)
        if not known:
            return 1.0, 1.0
        octave = math.log2(max(num_requests, 1.0))
        first, further = (interpolate(octave, known, [self._factors[k].values[i] for k in known]) for i in range(2))
        return first, further


def _octave(number: float) -> int:
    return round(math.log2(max(number, 1.0)))
