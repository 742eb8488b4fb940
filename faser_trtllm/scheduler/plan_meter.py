"""What the steps of a plan took and brought, counted as they pass: a few sums per step, by clock and counters."""

from __future__ import annotations

from collections.abc import Sequence

from faser_trtllm.core.decision import Mode, PlanStats
from faser_trtllm.core.plan import DraftResult, SchedulerOutput, VerifyResult

SKIPPED_STEPS = 2  # after a change between drafting and not: what was missed is made up for, and caches are cold
MAX_DRAFT_ROWS = 2  # per request, of a draft call's first step; more is a prompt that is made up for
NUM_LATE = 5  # the last fields of PlanStats
NUM_COUNTED = len(PlanStats.__dataclass_fields__) - NUM_LATE


class PlanMeter:
    """begin_step() when a step is scheduled, note() when it is verified, take() before the next plan."""

    def __init__(self) -> None:
        self._sums = [0.0] * NUM_COUNTED
        self._late = [0.0] * NUM_LATE
        self._step: tuple[float, ...] | None = None  # what the step that was noted last adds, but for its ms
        self._begun_s = 0.0
        self._num_skipped = 0
        self._was_drafting = False

    def begin_step(self, now_s: float) -> None:
        """A step begins, so the one before is over."""
        if self._step is not None:
            sums = self._sums
            for place, value in enumerate(self._step):
                sums[place] += value
            sums[1] += 1e3 * (now_s - self._begun_s)
            self._step = None
        self._begun_s = now_s

    def rest(self) -> None:
        """Nothing is left to do: the time to the next step is nobody's."""
        self._step = None

    def note(self, plan: SchedulerOutput, drafts: DraftResult, result: VerifyResult) -> None:
        self._step = None
        n = len(plan.view.decoding)
        is_drafting = plan.runs_draft_model
        if is_drafting != self._was_drafting:
            self._was_drafting, self._num_skipped = is_drafting, 0
        if n == 0:
            return
        calls = int(drafts.num_asked > 0)
        drafted = (0, 0, 0)
        is_late = calls and drafts.num_rows > MAX_DRAFT_ROWS * n
        if calls:
            new: Sequence[int] = drafts.num_new_drafts
            if drafts.num_free:
                new = [count - free for count, free in zip(new, drafts.num_free, strict=True)]
            drafted = (drafts.num_rows, max(new), sum(new))
        times = (drafts.draft_ms, result.verify_ms) if plan.mode is Mode.SERIAL else (0.0, 0.0)
        if is_late and drafted[1] and plan.mode is Mode.SERIAL:
            late = (1, *drafted, drafts.draft_ms)
            self._late = [total + value for total, value in zip(self._late, late, strict=True)]
        if self._num_skipped < SKIPPED_STEPS:
            self._num_skipped += 1
            return
        num_tokens, num_verified, context_rows = sum(result.num_tokens), sum(result.num_verified), 0
        if len(plan.scheduled) > n:  # prompts run in the pass, and some of them give a token
            verified = plan.verified
            num_tokens = sum([result.num_tokens[index] for index in verified])
            context_rows = sum(plan.scheduled.num_new_tokens) - n
        if is_late and drafts.num_rows > MAX_DRAFT_ROWS * n + context_rows:
            return
        pruned = sum(result.num_pruned) if result.num_pruned else 0
        accepted = sum(result.num_accepted) if num_tokens > n or num_verified or calls else 0
        counts = (
            num_tokens,
            n,
            n + num_verified + result.num_branches,
            num_verified,
            pruned,
            accepted,
            calls,
            *drafted,
            context_rows,
        )
        self._step = (1, 0.0, *times, *counts)

    def take(self) -> PlanStats:
        """What was summed up since it was taken last."""
        if not self._sums[0]:
            return PlanStats()
        one, ms, draft_ms, verify_ms, *counts = self._sums
        *late, late_ms = self._late
        self._sums, self._late = [0.0] * NUM_COUNTED, [0.0] * NUM_LATE
        return PlanStats(int(one), ms, draft_ms, verify_ms, *[int(count) for count in (*counts, *late)], late_ms)  # type: ignore[call-arg]
