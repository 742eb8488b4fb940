"""The cost table as it turns out on the running machine: scaled by what steps really take."""

from __future__ import annotations

import math

import numpy as np

from faser_trtllm.core.cost_table import ALL, CONTEXT_BUCKET, CostTable
from faser_trtllm.policy.base import Mode, StepOutcome
from faser_trtllm.policy.goodput import FloatArray, StepCosts

MEMORY = 0.95  # per step, of the time between steps
FEW = 8
STEP = 1.02  # of a scale, per step looked at
_PER_OCTAVE = 2  # scales of passes
LEARN_EVERY = 3  # steps, for the scales
MAX_SCALE = 16.0  # of a table that is wrong altogether
PUBLISH = 0.05  # relative change of a scale that makes new arrays
FEW_REQUESTS = 12
CACHE_SIZE = 512
LATE_ROWS = 64  # of a pass of the draft model over what it has missed, for its cost per row
MIN_LATE_ROWS = 16  # to learn from; fewer drown in what a draft call costs anyway
USUAL_ROWS = 1.5  # after a step the draft model has missed one token, or two where all its drafts were accepted
MAX_OVERHEAD = 0.5  # of a step's time; what is longer is a pause between requests, not overhead


def _bucket(num_rows: int) -> int:
    return round(_PER_OCTAVE * math.log2(num_rows))


class _Scale:
    """Measured over predicted time: the mean of the first few, then small steps towards the median."""

    def __init__(self) -> None:
        self._value = self.published = 1.0
        self._num_seen = 0

    def learn(self, measured_ms: float, predicted_ms: float) -> bool:
        """A pass with a late prompt or a busy neighbour moves it no further than any other. True: published is new."""
        if measured_ms <= 0.0 or predicted_ms <= 0.0:
            return False
        self._num_seen += 1
        ratio = min(measured_ms / predicted_ms, MAX_SCALE)
        if self._num_seen <= FEW:
            self._value += (min(ratio, 2.0 * self._value) - self._value) / (1.0 + self._num_seen)  # 1 counts as seen
        elif ratio > STEP * self._value:
            self._value *= STEP
        elif ratio < self._value / STEP:
            self._value /= STEP
        if abs(self._value / self.published - 1.0) <= PUBLISH:
            return False
        self.published = self._value
        return True


class MeasuredCosts:
    """costs() of a step, and what observe() learns: how much slower than the table drafting and passes run, and the
    time between steps, with and without drafting."""

    def __init__(self, costs: CostTable, max_draft_len: int) -> None:
        self._table = costs
        self._max_draft_len = max_draft_len
        self._draft = _Scale()
        self._late = _Scale()  # of prompts, and of what else the draft model has missed
        self._late_row_ms = costs.draft_rows_ms(LATE_ROWS, 1, LATE_ROWS) / LATE_ROWS
        self._verify: dict[int, _Scale] = {}  # by number of rows, two to the octave
        self._curve = np.ones(1)  # of a pass, by rows
        self._overhead = [costs.overhead_ms, costs.overhead_ms]  # off, drafting
        self._cache: dict[tuple[int, int, int], StepCosts] = {}
        self._num_steps = 0
        self._rows_per_draft = USUAL_ROWS  # of a draft call's first step, per request
        self._published_rows = USUAL_ROWS

    @property
    def table(self) -> CostTable:
        return self._table

    def costs(self, num_requests: int, base_rows: int, context_len: float) -> StepCosts:
        """For a step of num_requests decoding requests on base_rows rows before any draft (prompt rows included).

        Lists for a few requests, which a plain loop reads faster; arrays otherwise.
        """
        key = (num_requests, base_rows, int(context_len) // CONTEXT_BUCKET)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= CACHE_SIZE:
                self._cache.clear()
            found = self._cache[key] = self._make(num_requests, base_rows, context_len)
        return found

    @property
    def late_row_ms(self) -> float:
        """The draft's pass over tokens that it has missed (a prompt, mostly), per token."""
        return self._late.published * self._late_row_ms

    def observe(self, outcome: StepOutcome, context_len: float, next_s: float) -> float:
        """Learn from a step -> its duration in ms: up to the next one, planned at next_s, where the two adjoin."""
        self._num_steps += 1
        if outcome.mode is Mode.SERIAL:
            self._learn_late(outcome, context_len)
        plain = outcome.mode is Mode.SERIAL and outcome.num_context_rows == 0
        if plain and self._num_steps % LEARN_EVERY == 0:
            verify = self._table.verify_ms_array(outcome.num_rows, len(outcome.decoding), context_len)
            scale = self._verify.setdefault(_bucket(outcome.num_rows), _Scale())
            stale = scale.learn(outcome.verify_ms, float(verify[outcome.num_rows]))
            if outcome.num_drafted:
                stale |= self._learn_rows(outcome)
                expected_ms = self._draft_ms(outcome, outcome.num_draft_rows, context_len)
                stale |= self._draft.learn(outcome.draft_ms, expected_ms)
            if stale:
                self._curve = np.ones(1)
                self._cache.clear()
        elapsed = 1e3 * (next_s - outcome.now_s)
        between = elapsed - outcome.step_ms
        drafting = 1 if outcome.num_drafted else 0
        if not 0.0 <= between <= MAX_OVERHEAD * outcome.step_ms + 0.1:
            return outcome.step_ms + self._overhead[drafting]
        old = self._overhead[drafting]
        new = old + (1.0 - MEMORY) * (between - old)
        self._overhead[drafting] = new
        return elapsed

    def late_ms(self, outcome: StepOutcome) -> float:
        """What the step spent on tokens that the draft model had missed, beyond those of the step before."""
        return self.late_row_ms * max(0, outcome.num_draft_rows - 2 * len(outcome.decoding))

    def _learn_late(self, outcome: StepOutcome, context_len: float) -> None:
        num_late = outcome.num_draft_rows - 2 * len(outcome.decoding)
        if num_late < MIN_LATE_ROWS:
            return
        usual_ms = 0.0
        if outcome.num_drafted:
            usual_ms = self._draft.published * self._draft_ms(outcome, outcome.num_draft_rows - num_late, context_len)
        self._late.learn(outcome.draft_ms - usual_ms, num_late * self._late_row_ms)

    def _draft_ms(self, outcome: StepOutcome, num_rows: int, context_len: float) -> float:
        """By the table: the first pass over its rows, then a step for each further draft."""
        num_steps = max(1, max(outcome.num_pending))
        active = max(1, round(outcome.num_drafted / num_steps))
        step_ms = float(self._table.draft_step_ms_array(active, context_len)[active])
        return self._table.draft_rows_ms(num_rows, active, context_len) + (num_steps - 1) * step_ms

    def _learn_rows(self, outcome: StepOutcome) -> bool:
        num_drafting = sum(map(bool, outcome.num_pending))
        if outcome.num_draft_rows > 2 * num_drafting or not num_drafting:
            return False  # somebody's prompt
        self._rows_per_draft += (1.0 - MEMORY) * (outcome.num_draft_rows / num_drafting - self._rows_per_draft)
        if abs(self._rows_per_draft - self._published_rows) < 0.1:
            return False
        self._published_rows = self._rows_per_draft
        return True

    def _scales(self, max_rows: int) -> FloatArray:
        """By what the table's passes of 0 to max_rows rows are multiplied.

        What a pass of some rows teaches holds for passes of about as many, and fades within octaves: a table may be
        right where rows wait for memory and wrong where they compute. Where nothing was learnt the table is believed,
        so that what it promises is tried.
        """
        if self._curve.size <= max_rows:
            place = _PER_OCTAVE * np.log2(np.maximum(np.arange(max(max_rows, 64) + 1), 1))
            known = np.array(list(self._verify), np.float64)
            excess = np.array([scale.published - 1.0 for scale in self._verify.values()])
            weight = np.exp(-np.abs(place[:, None] - known) / _PER_OCTAVE)
            self._curve = 1.0 + (weight @ excess) / np.maximum(weight.sum(axis=1), 1.0)
        return self._curve[: max_rows + 1]

    def _make(self, num_requests: int, base_rows: int, context_len: float) -> StepCosts:
        last = base_rows + num_requests * self._max_draft_len
        verify = self._table.verify_ms_array(last, num_requests, context_len, ALL)
        draft = self._table.draft_step_ms_array(num_requests, context_len, ALL)
        first = self._table.draft_first_ms_array(num_requests, self._published_rows, context_len, ALL)
        off, drafting = self._overhead
        verify = self._scales(last)[base_rows:] * verify[base_rows : last + 1]
        draft = self._draft.published * draft[: num_requests + 1]
        first = self._draft.published * first
        if num_requests <= FEW_REQUESTS:
            return StepCosts(verify.tolist(), first.tolist(), draft.tolist(), drafting, off)
        return StepCosts(verify, first, draft, drafting, off)
