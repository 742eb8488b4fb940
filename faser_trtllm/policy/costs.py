"""The cost table as it turns out on the running machine: plain averages of log(ms / table).

One average, soon forgotten, is the machine's speed, which all passes share and no choice depends on. One per kind of
pass and log2 of its rows is the table's error beside that, which holds still. All prices are in ms of the machine's
usual speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from faser_trtllm.core.cost_table import ALL, CostTable
from faser_trtllm.ops.arrays import Float64Array
from faser_trtllm.policy.base import PlanStats

SPEED_MS = 500.0  # of steps, after which the machine's speed is another
ERROR_MS = 20_000.0  # of steps, after which the table's error may be another
PRIOR_MS = 5.0  # of steps, that the table counts as
DRAFT_ROWS = 1.8  # per request, of a draft call's first step: one token was missed, or two if all drafts were accepted
LATE_ROWS = 64  # of a draft pass over what it has missed; its cost per row is that of as many more


class Average:
    """A mean whose old parts are forgotten: all together weigh `memory` at most. prior: what 0 counts as."""

    __slots__ = ("_memory", "mean", "weight")

    def __init__(self, memory: float, prior: float = 0.0) -> None:
        self.mean, self.weight, self._memory = 0.0, prior, memory

    def add(self, value: float, weight: float) -> None:
        if weight <= 0.0:  # of steps within one tick of a coarse clock
            return
        self.weight = min(self.weight + weight, self._memory)
        self.mean += min(1.0, weight / self.weight) * (value - self.mean)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Of a step for a number of requests, in ms.

    rows [num_rows + 1]: a pass over so many rows. verify [num_slots + 1]: one with so many slots and no prompts.
    draft_first [num_requests + 1]: the first step of a draft call for so many requests (0 for none), which also runs
    what was committed since the last one. draft_step [num_requests + 1]: a further step. host_ms: of a step with
    drafting, beside these; off_ms: all of a step without, prompts left out.
    """

    num_requests: int
    rows: Float64Array
    verify: Float64Array
    draft_first: Float64Array
    draft_step: Float64Array
    host_ms: float
    off_ms: float
    off_host_ms: float

    def off_beside(self, prompts: Mapping[int, float]) -> float:
        """`off_ms`, averaged over steps of which such shares run so many rows of prompts."""
        extra = sum(share * float(self.rows[self.num_requests + rows]) for rows, share in prompts.items())
        share = sum(prompts.values())
        return (1.0 - share) * self.off_ms + share * self.off_host_ms + extra

    def beside(self, prompts: Mapping[int, float]) -> Float64Array:
        """`verify`, averaged over passes of which such shares run so many rows of prompts."""
        mean = (1.0 - sum(prompts.values())) * self.verify
        for num_rows, share in prompts.items():
            first = self.num_requests + num_rows
            mean += share * self.rows[first : first + mean.size]
        return mean


class MeasuredCosts:
    def __init__(self, table: CostTable, max_draft_len: int) -> None:
        self.table = table
        self._max_draft_len = max_draft_len
        self._speed = Average(SPEED_MS)  # log
        self._errors: dict[tuple[str, int], Average] = {}  # by kind of pass and log2(rows): logs
        self._host: dict[tuple[bool, int], Average] = {}  # by drafting and log2(requests): ms of a step

    @property
    def slowness(self) -> float:
        """How much slower than usual the machine is just now."""
        return math.exp(self._speed.mean)

    def late_row_ms(self, num_requests: int) -> float:
        """Of the draft model's pass over tokens that it has missed (a prompt, mostly), per token: they run behind the
        rows of the first step of a draft call for so many requests."""
        rows = round(DRAFT_ROWS * num_requests)
        few, many = (self.table.draft_rows_ms(rows + more, num_requests, LATE_ROWS) for more in (0, LATE_ROWS))
        return max(0.0, many - few) / LATE_ROWS * math.exp(self._error("draft", num_requests))

    def observe(self, stats: PlanStats, context_len: float) -> float:
        """Learn from the steps of a plan -> the ms that they would have taken at the machine's usual speed without the
        prompts; not positive where those should have taken longer than all did."""
        steps, n = stats.num_steps, stats.num_requests / stats.num_steps
        rows = (stats.num_rows + stats.num_context_rows) / steps
        kind = "verify" if stats.num_draft_calls or rows > n else "decode"
        pass_ms = self.table.verify_ms(1, 1, context_len) if rows < 1 else self._pass_ms(kind, rows, n, context_len)
        passes = [(kind, rows, stats.verify_ms, steps * pass_ms)]
        if stats.num_drafted:  # a call of a draft model that is broken may give none
            drafting = stats.num_drafted / stats.num_draft_steps
            calls, first_rows = stats.num_draft_calls, stats.num_draft_rows / stats.num_draft_calls
            first_ms = self.table.draft_rows_ms(first_rows, drafting, context_len)  # type: ignore[arg-type]
            further_ms = self.table.draft_step_ms(drafting, context_len)  # type: ignore[arg-type]
            table_ms = calls * first_ms + (stats.num_draft_steps - calls) * further_ms
            passes.append(("draft", drafting, stats.draft_ms, table_ms))
        passes = [p for p in passes if p[2] > 0.0 and p[3] > 0.0]
        if not passes:  # lanes overlapped, which tells of neither
            return stats.ms / self.slowness
        expected_ms = sum(ms * math.exp(self._error(kind, rows)) for kind, rows, _, ms in passes)
        slowness = sum(measured_ms for _, _, measured_ms, _ in passes) / expected_ms
        prompts_ms = 0.0
        if stats.num_context_rows:
            few = stats.num_rows / steps
            alone = "verify" if stats.num_draft_calls else "decode"
            alone_ms = self._pass_ms(alone, few, n, context_len) * math.exp(self._error(alone, few))
            prompts_ms = steps * (pass_ms * math.exp(self._error(kind, rows)) - alone_ms)
            if stats.num_draft_calls:
                prompts_ms += stats.num_context_rows * self.late_row_ms(round(n))
        self._speed.add(math.log(slowness), stats.ms)
        for kind, rows, measured_ms, table_ms in passes:
            error = self._errors.setdefault((kind, round(math.log2(rows))), Average(ERROR_MS, PRIOR_MS))
            error.add(math.log(measured_ms / table_ms) - self._speed.mean, measured_ms)
        host_ms = max(0.0, stats.ms - stats.draft_ms - stats.verify_ms) / slowness / steps
        key = bool(stats.num_draft_calls), round(math.log2(n))
        self._host.setdefault(key, Average(ERROR_MS)).add(host_ms, stats.ms)
        return stats.ms / slowness - prompts_ms

    def _pass_ms(self, kind: str, rows: float, num_requests: float, context_len: float) -> float:
        if kind == "decode":
            return self.table.decode_ms(num_requests, context_len)  # type: ignore[arg-type]
        return self.table.verify_ms(rows, num_requests, context_len)  # type: ignore[arg-type]

    def _error(self, kind: str, rows: float) -> float:
        return float(self._error_curve(kind, np.array([rows]))[0])

    def _error_curve(self, kind: str, rows: Float64Array) -> Float64Array:
        """The log of the table's error by rows: between the numbers that were measured, and beyond as the nearest."""
        known = sorted((octave, average.mean) for (name, octave), average in self._errors.items() if name == kind)
        if not known:
            return np.zeros(rows.size)
        octaves, means = zip(*known, strict=True)
        found: Float64Array = np.interp(np.log2(np.maximum(rows, 1.0)), octaves, means)
        return found

    def _host_ms(self, num_requests: int, is_drafting: bool) -> float:
        """Of the number of requests that is nearest, with drafting or else without."""
        octave = math.log2(num_requests)
        known = [key for key in self._host if key[0] == is_drafting] or list(self._host)
        return self._host[min(known, key=lambda key: abs(key[1] - octave))].mean if known else self.table.overhead_ms

    def step(self, n: int, context_len: float, num_prompt_rows: int = 0) -> StepCosts:
        """For a step of n decoding requests, beside up to so many rows of prompts."""
        num_slots = n * self._max_draft_len
        last = n + num_slots + num_prompt_rows
        rows = self.table.verify_ms_array(last, n, context_len, ALL)[: last + 1]
        rows = rows * np.exp(self._error_curve("verify", np.arange(last + 1.0)))
        verify = rows[n : n + num_slots + 1]
        step = first = np.zeros(n + 1)
        if self.table.has("draft_step"):  # else there is no draft model
            errors = np.exp(self._error_curve("draft", np.arange(n + 1.0)))
            step = errors * self.table.draft_step_ms_array(n, context_len, ALL)[: n + 1]
            first = errors * self.table.draft_first_ms_array(n, DRAFT_ROWS, context_len, ALL)[: n + 1]
        decode_ms = self.table.decode_ms(n, context_len) * math.exp(self._error("decode", n))
        off_host_ms = self._host_ms(n, False)
        return StepCosts(n, rows, verify, first, step, self._host_ms(n, True), decode_ms + off_host_ms, off_host_ms)
