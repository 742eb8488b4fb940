"""The cost table as it turns out on the running machine: scaled by what steps really take.

All times are those of the machine's usual speed: what makes everything slower for a while (scales.py) is divided out,
since no choice depends on it.
"""

from __future__ import annotations

from faser_trtllm.core.cost_table import ALL, CONTEXT_BUCKET, CostTable, context_bucket
from faser_trtllm.policy.base import Mode, StepOutcome
from faser_trtllm.policy.goodput import StepCosts
from faser_trtllm.policy.overheads import Overheads
from faser_trtllm.policy.scales import DRAFT_SCALE, Mood, ScalesByRows

MEMORY = 0.95  # per step, of the time between steps
FEW_REQUESTS = 12
CACHE_SIZE = 512
LATE_ROWS = 64  # of a pass of the draft model over what it has missed, for its cost per row
MIN_LATE_ROWS = 16  # to learn from; fewer drown in what a draft call costs anyway
USUAL_ROWS = 1.5  # after a step the draft model has missed one token, or two where all its drafts were accepted
MAX_OVERHEAD = 0.5  # of a step's time; what is longer is a pause between requests, not overhead


class MeasuredCosts:
    """costs() of a step, and what observe() learns: how much slower than the table drafting and passes run, and the
    time between steps, with and without drafting."""

    def __init__(self, costs: CostTable, max_draft_len: int) -> None:
        self._table = costs
        self._max_draft_len = max_draft_len
        self.mood = Mood()
        self._draft = self.mood.new_scale(DRAFT_SCALE)
        self._late = self.mood.new_scale(DRAFT_SCALE)  # of prompts, and of what else the draft model has missed
        self._late_row_ms = costs.draft_rows_ms(LATE_ROWS, 1, LATE_ROWS) / LATE_ROWS
        self._verify, self._decode = ScalesByRows.pair(self.mood)  # of steps with drafts and without
        self._overheads = Overheads(costs.overhead_ms)
        self._cache: dict[tuple[int, int, int], StepCosts] = {}
        self._observed_s: float | None = None
        self._rows_per_draft = USUAL_ROWS  # of a draft call's first step, per request
        self._published_rows = USUAL_ROWS

    @property
    def table(self) -> CostTable:
        return self._table

    def costs(self, num_requests: int, base_rows: int, context_len: float) -> StepCosts:
        """For a step of num_requests decoding requests on base_rows rows before any draft (prompt rows included).

        Lists for a few requests, which a plain loop reads faster; arrays otherwise.
        """
        bucket = context_bucket(context_len)
        key = (num_requests, base_rows, bucket)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= CACHE_SIZE:
                self._cache.clear()
            found = self._cache[key] = self._make(num_requests, base_rows, float(bucket * CONTEXT_BUCKET))
        return found

    @property
    def late_row_ms(self) -> float:
        """The draft's pass over tokens that it has missed (a prompt, mostly), per token."""
        return self.mood.published(self._late) * self._late_row_ms

    def observe_idle(self, num_requests: int, context_len: float, num_steps: int, ms: float, now_s: float) -> None:
        """So many steps without drafts and prompts took ms each until now_s."""
        last_s, self._observed_s = self._observed_s, now_s
        self.mood.pass_time(num_steps * ms if last_s is None else 1e3 * (now_s - last_s))
        pass_ms = ms - self.mood.factor * self._overheads.ms(num_requests, False)
        decode_ms = self._table.decode_ms(num_requests, context_len)
        if self._decode.learn(num_requests, pass_ms, decode_ms, num_steps):
            self._forget()

    def observe(self, outcome: StepOutcome, context_len: float, next_s: float | None) -> None:
        """Learn from a step, which lasts until the next one is planned: at next_s, if that is known.

        The step before must have been of the same kind: a draft now and then takes several times what one of many does.
        """
        last_s, self._observed_s = self._observed_s, outcome.now_s
        self.mood.pass_time(max(outcome.step_ms, 0.0 if last_s is None else 1e3 * (outcome.now_s - last_s)))
        if outcome.mode is Mode.SERIAL:
            is_new = outcome.num_context_rows == 0 and self._learn_pass(outcome, context_len)
            is_new |= self._learn_late(outcome, context_len)
            if is_new:
                self._forget()
        if next_s is None:
            return
        # In serial steps the host's own time lies before and behind the engines' and between them.
        engines_ms = outcome.draft_ms + outcome.verify_ms if outcome.mode is Mode.SERIAL else outcome.step_ms
        between_ms = 1e3 * (next_s - outcome.now_s) - engines_ms
        if not 0.0 <= between_ms <= MAX_OVERHEAD * engines_ms + 0.1:
            return
        if self._overheads.learn(len(outcome.decoding), outcome.num_drafted > 0, between_ms / self.mood.factor):
            self._cache.clear()

    def _forget(self) -> None:
        self._cache.clear()
        self._verify.forget_curve()
        self._decode.forget_curve()

    def _learn_pass(self, outcome: StepOutcome, context_len: float) -> bool:
        num_rows, num_requests = outcome.num_rows, len(outcome.decoding)
        if not outcome.num_drafted and num_rows == num_requests:
            decode_ms = self._table.decode_ms(num_requests, context_len)
            return self._decode.learn(num_rows, outcome.verify_ms, decode_ms)
        verify = self._table.verify_ms_array(num_rows, num_requests, context_len)
        is_new = self._verify.learn(num_rows, outcome.verify_ms, float(verify[num_rows]))
        if outcome.num_drafted:
            is_new |= self._learn_rows(outcome)
            expected_ms = self._draft_ms(outcome, outcome.num_draft_rows, context_len)
            is_new |= self.mood.learn(self._draft, outcome.draft_ms, expected_ms, moves=False)
        return is_new

    def _learn_late(self, outcome: StepOutcome, context_len: float) -> bool:
        num_late = outcome.num_draft_rows - 2 * len(outcome.decoding)
        if num_late < MIN_LATE_ROWS:
            return False
        usual_ms = 0.0
        if outcome.num_drafted:
            usual_ms = self._draft_ms(outcome, outcome.num_draft_rows - num_late, context_len)
            usual_ms *= self.mood.published(self._draft) * self.mood.factor
        return self.mood.learn(self._late, outcome.draft_ms - usual_ms, num_late * self._late_row_ms, moves=False)

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

    def _make(self, num_requests: int, base_rows: int, context_len: float) -> StepCosts:
        last = base_rows + num_requests * self._max_draft_len
        verify = self._table.verify_ms_array(last, num_requests, context_len, ALL)
        draft = self._table.draft_step_ms_array(num_requests, context_len, ALL)
        first = self._table.draft_first_ms_array(num_requests, self._published_rows, context_len, ALL)
        off, drafting = (self._overheads.ms(num_requests, is_drafting) for is_drafting in (False, True))
        verify = self._verify.curve(last)[base_rows:] * verify[base_rows : last + 1]
        off_ms = off + float(verify[0])
        if base_rows == num_requests:
            scale = float(self._decode.curve(num_requests)[num_requests])
            off_ms = off + scale * self._table.decode_ms(num_requests, context_len)
        draft = self.mood.published(self._draft) * draft[: num_requests + 1]
        first = self.mood.published(self._draft) * first
        if num_requests <= FEW_REQUESTS:
            return StepCosts(verify.tolist(), first.tolist(), draft.tolist(), drafting, off_ms)
        return StepCosts(verify, first, draft, drafting, off_ms)
