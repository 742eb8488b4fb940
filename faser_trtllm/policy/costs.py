"""The cost table, corrected by what passes take on the running machine.

Every kind of pass has an average of log(ms / table) by log2 of its rows: the table's error, which hardly changes.
What all well-known kinds have in common is the machine's current speed, which is forgotten quickly and on which no
choice depends. All costs are in ms at the machine's usual speed.

With a mixture of experts, a pass is compared with the table at the experts it read, and a future pass is predicted at
those that its rows are expected to read. 16 rows of one request then do not cost the same as one row each of 16
requests, so the table's error is also kept by log2 of the requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from faser_trtllm.core.cost.experts import BatchReads
from faser_trtllm.core.cost_curve import interpolate
from faser_trtllm.core.cost_table import ALL, CostTable
from faser_trtllm.ops.arrays import Float64Array
from faser_trtllm.policy.average import Average
from faser_trtllm.policy.base import PlanStats
from faser_trtllm.policy.cost.experts import RoutingEstimator
from faser_trtllm.policy.draft_costs import DraftCosts

SPEED_MS = 500.0  # averaging window, in ms of steps: the machine's speed may change after this
ERROR_MS = 20_000.0  # averaging window of the table's error, in ms of steps
PRIOR_MS = 5.0  # weight of the table, in ms of steps
KNOWN_MS = 50.0  # ms of passes after which their error is known and their time shows the machine's speed
ALIKE = 3.0  # a common slowdown of two kinds is at most this many times the smaller of theirs
MOST = math.log(1000.0)  # limit on a curve's error
SETTLED_MS = 2_000.0  # minimum weight of a known error, in ms of passes
LONGEST = 3.0  # a known time counts at most this many times what is expected: more is a pause of the machine
DOUBTFUL = 1.5  # a time that is not known yet counts only with the next if it is so many times what is expected
HOST_SLACK_MS = 0.1  # added to the expected host time of a step for that limit


@dataclass(frozen=True, slots=True)
class ExpertCosts:
    """The part of pass times that experts take."""

    ms: Float64Array  # [num_rows + 1] ms per expert read, for passes over 0 to num_rows rows
    reads: BatchReads  # experts read, by slots


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a step for a number of requests, in ms."""

    num_requests: int
    rows: Float64Array  # [num_rows + 1] a pass over 0 to num_rows rows, without the time of experts
    verify: Float64Array  # [num_slots + 1] a pass with 0 to num_slots draft rows (slots), without prompts
    draft_first: Float64Array  # [num_requests + 1] a draft call's first step, with tokens committed since the last
    draft_step: Float64Array  # [num_requests + 1] each further step
    host_ms: float  # host time of a step with drafting
    off_ms: float  # a whole step without drafting or prompts
    off_host_ms: float  # host time of a step without drafting
    experts: ExpertCosts | None = None

    def off_with_prompts(self, prompts: Mapping[int, float]) -> float:
        """Return off_ms averaged over steps; prompts: by number of prompt rows, the share of steps that run them."""
        extra = sum(share * float(self._next_to(rows)[0]) for rows, share in prompts.items())
        share = sum(prompts.values())
        return (1.0 - share) * self.off_ms + share * self.off_host_ms + extra

    def with_prompts(self, prompts: Mapping[int, float]) -> Float64Array:
        """Return verify averaged over passes; prompts: by number of prompt rows, the share of passes that run them."""
        mean = (1.0 - sum(prompts.values())) * self.verify
        for num_rows, share in prompts.items():
            mean += share * self._next_to(num_rows)
        return mean

    def experts_with_prompts(self, prompts: Mapping[int, float]) -> Float64Array | None:
        """Return the part of with_prompts() that experts take, or None without experts."""
        experts = self.experts
        if experts is None:
            return None
        shares = {0: 1.0 - sum(prompts.values())} | dict(prompts)
        reads = {rows: experts.ms[self._passes(rows)] * experts.reads.distinct(rows) for rows in shares}
        return np.asarray(sum(share * reads[rows] for rows, share in shares.items()))

    def _next_to(self, num_prompt_rows: int) -> Float64Array:
        """Return verify for passes that also run num_prompt_rows rows of a prompt."""
        passes = self._passes(num_prompt_rows)
        if self.experts is None:
            return self.rows[passes]
        return self.rows[passes] + self.experts.ms[passes] * self.experts.reads.distinct(num_prompt_rows)

    def _passes(self, num_prompt_rows: int) -> slice:
        """Return the indices of rows for passes of 0 to num_slots slots."""
        first = self.num_requests + num_prompt_rows
        return slice(first, first + self.verify.size)


class MeasuredCosts:
    def __init__(self, table: CostTable, max_draft_len: int) -> None:
        self.table = table
        self._max_draft_len = max_draft_len
        self._speed = Average(SPEED_MS)  # log
        # Logs by kind, log2(rows) and, for a mixture of experts, log2(requests).
        self._errors: dict[tuple[str, int, int], Average] = {}
        self._routing = None if table.routing is None else RoutingEstimator(table.routing)
        self._drafts = DraftCosts(table)
        self._host: dict[tuple[bool, int], Average] = {}  # ms per step, by drafting and log2(requests)
        self._doubted: set[tuple[str, int, int] | tuple[bool, int]] = set()  # keys of both whose last time was DOUBTFUL
        self.were_known = False  # True if the errors of the last observe()'s passes were known before it

    @property
    def slowness(self) -> float:
        """Factor by which the machine is currently slower than usual."""
        return math.exp(self._speed.mean)

    def late_row_ms(self, num_requests: int) -> float:
        """Return ms per missed token, mostly of prompts, that the draft model runs in addition to the rows of the first
        step of a draft call for this many requests."""
        return self._drafts.late_row_ms(num_requests)

    def observe(self, stats: PlanStats, context_len: float) -> float:
        """Learn from the steps of a plan and return their ms at the machine's usual speed and without prompts. The
        result is not positive if the prompts alone should have taken longer than all of it."""
        steps, n = stats.num_steps, stats.num_requests / stats.num_steps
        rows = (stats.num_rows + stats.num_context_rows) / steps
        kind = "verify" if stats.num_draft_calls or rows > n else "decode"
        num_experts = stats.num_experts / steps or None
        if self._routing is not None and num_experts and not (stats.num_context_rows or stats.num_pruned):
            self._observe_experts(self._routing, stats)
        pass_ms = steps * self._pass_ms(kind, rows, n, context_len, num_experts)
        key = kind, _octave(rows), self._size(n)
        error = self._errors.get(key)
        if error is None:  # start from the nearest sizes
            error = Average(ERROR_MS, PRIOR_MS, self._error(kind, rows, n))
        seen: list[tuple[float, float]] = []  # (log of ms over expected ms, ms) of kinds whose error is known
        verify_ms = stats.verify_ms
        is_timed = verify_ms > 0.0 and pass_ms > 0.0
        expected_ms = pass_ms * math.exp(error.mean) * self.slowness
        is_known = error.weight >= KNOWN_MS
        is_paused = is_timed and not is_known and self._is_paused(key, verify_ms > DOUBTFUL * expected_ms)
        if is_timed and is_known:
            verify_ms = min(verify_ms, LONGEST * expected_ms)
            seen.append((math.log(verify_ms / pass_ms) - error.mean, verify_ms))
        drafts = self._drafts.expect(stats, context_len)
        if drafts is not None and drafts.is_known:
            seen.append((math.log(stats.draft_ms / drafts.ms), stats.draft_ms))
        self.were_known = len(seen) == is_timed + (drafts is not None)
        if seen:
            self._speed.add(_in_common(seen), stats.ms)
        slowness = self.slowness
        if is_paused:
            return stats.ms / slowness
        if is_timed:
            self._errors[key] = error
            wrong = math.log(verify_ms / pass_ms) - self._speed.mean
            error.add(min(max(wrong, -MOST), MOST), verify_ms)
            if error.weight >= KNOWN_MS:  # from now on, quick changes are the machine's
                error.weight = max(error.weight, SETTLED_MS)
        self._drafts.observe(stats, context_len, slowness)
        if not is_timed:  # drafting and verification overlapped, so neither was timed alone
            return stats.ms / slowness
        prompts_ms = 0.0
        if stats.num_context_rows:
            num_rows = stats.num_rows / steps
            alone_ms = self._decode_ms(n, context_len)
            if stats.num_draft_calls:
                alone_ms = self._pass_ms("verify", num_rows, n, context_len)
                alone_ms *= math.exp(self._error("verify", num_rows, n))
            prompts_ms = pass_ms * math.exp(self._error(kind, rows, n)) - steps * alone_ms
            if stats.num_draft_calls:
                prompts_ms += stats.num_context_rows * self.late_row_ms(round(n))
        host_ms = max(0.0, stats.ms - stats.draft_ms - stats.verify_ms) / slowness / steps
        host_key = bool(stats.num_draft_calls), _octave(n)
        host = self._host.get(host_key, Average(ERROR_MS))
        if host.weight >= KNOWN_MS:
            host_ms = min(host_ms, LONGEST * (host.mean + HOST_SLACK_MS))
        elif self._is_paused(host_key, host_ms > DOUBTFUL * (self._host_ms(n, host_key[0]) + HOST_SLACK_MS)):
            return stats.ms / slowness - prompts_ms
        self._host[host_key] = host
        host.add(host_ms, stats.draft_ms + verify_ms + host_ms * slowness * steps)
        return stats.ms / slowness - prompts_ms

    def _is_paused(self, key: tuple[str, int, int] | tuple[bool, int], is_long: bool) -> bool:
        """Return True for the first long time of a kind that is not known yet: the machine may have paused. If the next
        one is long, too, the table is wrong."""
        if is_long and key not in self._doubted:
            self._doubted.add(key)
            return True
        self._doubted.discard(key)
        return False

    def _observe_experts(self, routing: RoutingEstimator, stats: PlanStats) -> None:
        steps = stats.num_steps
        routing.observe(steps, stats.num_rows / steps, stats.num_requests / steps, stats.num_experts / steps)
        if routing.routing is not self.table.routing:
            self.table = replace(self.table, routing=routing.routing)

    def _pass_ms(
        self, kind: str, rows: float, num_requests: float, context_len: float, num_experts: float | None = None
    ) -> float:
        """Return the table's ms of a pass. num_experts: experts read; None: the number expected for these rows."""
        if rows < 1:
            return self.table.verify_ms(1, 1, context_len)
        if kind == "decode":
            return self.table.decode_ms(num_requests, context_len, num_experts)  # type: ignore[arg-type]
        return self.table.verify_ms(rows, num_requests, context_len, ALL, num_experts)  # type: ignore[arg-type]

    def _size(self, num_requests: float) -> int:
        """Return the class of batch sizes that has its own errors."""
        return 0 if self._routing is None else _octave(num_requests)

    def _decode_ms(self, num_requests: float, context_len: float) -> float:
        """Return ms of a step without drafts, at most that of a pass with drafting, whatever the table has."""
        kinds = ("decode", "verify")
        ms = (
            self._pass_ms(k, num_requests, num_requests, context_len)
            * math.exp(self._error(k, num_requests, num_requests))
            for k in kinds
        )
        return min(ms)

    def _error(self, kind: str, rows: float, num_requests: float) -> float:
        """Return the log of the table's error at the nearest batch size, interpolated between measured numbers of rows
        and constant beyond them."""
        known = self._known(kind, num_requests)
        return interpolate(math.log2(max(rows, 1.0)), *known) if known else 0.0

    def _error_curve(self, kind: str, rows: Float64Array, num_requests: float) -> Float64Array:
        known = self._known(kind, num_requests)
        found: Float64Array = np.interp(np.log2(np.maximum(rows, 1.0)), *known) if known else np.zeros(rows.size)
        return found

    def _known(self, kind: str, num_requests: float) -> tuple[list[int], list[float]] | None:
        """Return log2 of the measured numbers of rows, ascending, and their errors; None if there are none."""
        wanted = self._size(num_requests)
        sizes = {size for name, _, size in self._errors if name == kind}
        if not sizes:
            return None
        size = min(sizes, key=lambda known: (abs(known - wanted), known))
        octaves = sorted(octave for name, octave, of in self._errors if (name, of) == (kind, size))
        return octaves, [self._errors[kind, octave, size].mean for octave in octaves]

    def _host_ms(self, num_requests: float, is_drafting: bool) -> float:
        """Return the host time for the nearest measured number of requests, preferably with the same is_drafting."""
        octave = math.log2(num_requests)
        known = [key for key in self._host if key[0] == is_drafting] or list(self._host)
        return self._host[min(known, key=lambda key: abs(key[1] - octave))].mean if known else self.table.overhead_ms

    def step(self, n: int, context_len: float, num_prompt_rows: int = 0) -> StepCosts:
        """Return the costs of a step of n decoding requests, with up to num_prompt_rows rows of prompts."""
        num_slots = n * self._max_draft_len
        last = n + num_slots + num_prompt_rows
        errors = np.exp(self._error_curve("verify", np.arange(last + 1.0), n))
        rows = self.table.rows_ms_array(last, n, context_len) * errors
        verify, experts = rows[n : n + num_slots + 1], self._expert_costs(n, num_slots, errors)
        if experts is not None:
            verify = verify + experts.ms[n : n + num_slots + 1] * experts.reads.distinct(0)
        first, step = self._drafts.arrays(n, context_len)
        off_host_ms = self._host_ms(n, False)
        off_ms = self._decode_ms(n, context_len) + off_host_ms
        return StepCosts(n, rows, verify, first, step, self._host_ms(n, True), off_ms, off_host_ms, experts)

    def _expert_costs(self, n: int, num_slots: int, errors: Float64Array) -> ExpertCosts | None:
        per_expert_ms, routing = self.table.per_expert_ms, self.table.routing
        if routing is None or not per_expert_ms:
            return None
        return ExpertCosts(per_expert_ms * errors, routing.reads_of(np.arange(n, n + num_slots + 1), n))


def _in_common(seen: Sequence[tuple[float, float]]) -> float:
    """Return the mean log slowdown of several kinds of passes, weighted by ms, at most a few times the least of them,
    because a curve that is wrong does not make the machine slow."""
    least, most = min(log for log, _ in seen), max(log for log, _ in seen)
    if least < 0.0 < most:
        return 0.0
    bound = ALIKE * min(abs(least), abs(most)) if len(seen) > 1 else math.inf
    mean = sum(log * weight for log, weight in seen) / sum(weight for _, weight in seen)
    return max(-bound, min(mean, bound))


def _octave(number: float) -> int:
    return round(math.log2(max(number, 1.0)))
