"""A guard that turns speculation off while drafting fails or no draft is accepted; the output stays the same.

The service puts it around policy and drafter; commands that measure or check do not, so that they show the error.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable

import numpy as np

from faser_trtllm import native
from faser_trtllm.core.clock import Clock
from faser_trtllm.core.counts import DRAFTERS
from faser_trtllm.core.plan import DraftResult, SchedulerOutput, StepRecord
from faser_trtllm.drafters.base import nothing_drafted
from faser_trtllm.errors import OutOfMemoryError
from faser_trtllm.executor.draft_worker import DraftStage
from faser_trtllm.executor.stats import StepWatcher
from faser_trtllm.policy.base import Decision, PlanStats, Policy, StepView

log = logging.getLogger(__name__)

BACKOFF_S = 2.0  # time without speculation after the first failure, doubled after each further one; longer than the
# interval between two publications of the metrics, so that the gauge shows it
BACKOFF_MAX_S = 300.0
FRUITLESS_STEPS = 1000  # consecutive steps without an accepted draft
EMPTY_STEPS = 16  # consecutive steps without a draft: the draft model's logits are NaN or infinite


class DisabledReason(str, enum.Enum):
    """Reason why speculation is off for a while, a label of the metric faser_spec_disabled."""

    DRAFT_ERROR = "draft_error"
    DRAFT_OOM = "draft_oom"
    DRAFT_TIMEOUT = "draft_timeout"
    DRAFT_NAN = "draft_nan"
    NO_ACCEPTANCE = "no_acceptance"


class SpeculationGuard(StepWatcher):
    """Counts failures and decides whether to speculate: after a failure not for a back-off time, then again.

    A failure is assumed not to depend on the drafted tokens, so dropping the drafts of a failed call is exact. What a
    call writes before it fails is ignored: the length of valid draft KV stays what it was.
    """

    def __init__(
        self, clock: Clock, draft_timeout_ms: float, max_draft_rows: int, forget_draft_kv: Callable[[], None]
    ) -> None:
        """draft_timeout_ms: limit for a call with at most max_draft_rows rows per request (see SchedulerLimits) in its
        first pass; calls that also run prompts have none. forget_draft_kv: see Scheduler.forget_draft_kv."""
        self._clock = clock
        self._draft_timeout_ms = draft_timeout_ms
        self._max_draft_rows = max_draft_rows
        self._forget_draft_kv = forget_draft_kv
        self._reason: DisabledReason | None = None
        self._retry_at_s = 0.0
        self._backoff_s = BACKOFF_S
        self._num_disabled: Counter[DisabledReason] = Counter()
        self._num_fruitless = 0
        self._num_empty = 0

    @property
    def is_off(self) -> bool:
        return self._reason is not None

    def is_off_now(self) -> bool:
        """Return True if speculation is off in the next step; end a back-off that is over."""
        if self._reason is not None and self._clock.now_s() >= self._retry_at_s:
            log.warning("speculation is tried again after %s", self._reason.value)
            self._reason = None
        return self._reason is not None

    def gauges(self) -> dict[str, float]:
        """Return, for each reason, whether speculation is off for it now and how often it was. Thread-safe."""
        off = self._reason if self._clock.now_s() < self._retry_at_s else None
        values = {f"spec_disabled_{reason.value}": float(reason is off) for reason in DisabledReason}
        return values | {f"num_spec_fallbacks_{reason.value}": self._num_disabled[reason] for reason in DisabledReason}

    def drafted(self, plan: SchedulerOutput, drafts: DraftResult) -> None:
        """Note a draft call that returned."""
        if not drafts.num_asked:
            return
        num_drafted = int(drafts.num_new_drafts.sum())
        if drafts.num_free is not None:
            num_drafted -= int(drafts.num_free.sum())
        is_steady = drafts.num_rows <= self._max_draft_rows * len(plan.scheduled)
        if is_steady and drafts.draft_ms > self._draft_timeout_ms:
            self._disable(
                DisabledReason.DRAFT_TIMEOUT,
                f"a draft call took {drafts.draft_ms:.0f} ms, draft_timeout_ms is {self._draft_timeout_ms:g}",
            )
        elif num_drafted:
            self._num_empty = 0
        elif _asks_without_mask(plan, drafts):
            self._num_empty += 1
            if self._num_empty >= EMPTY_STEPS:
                self._disable(DisabledReason.DRAFT_NAN, f"{EMPTY_STEPS} draft calls in a row gave no draft")

    def failed(self, error: Exception) -> None:
        """Note a draft call that raised an exception."""
        # torch's error has this name; torch is not imported for it.
        is_oom = isinstance(error, MemoryError | OutOfMemoryError) or type(error).__name__ == "OutOfMemoryError"
        reason = DisabledReason.DRAFT_OOM if is_oom else DisabledReason.DRAFT_ERROR
        self._disable(reason, f"a draft call failed with {type(error).__name__}: {error}")

    def step(self, record: StepRecord) -> None:
        """Note a step that is over; it was fruitless if it drafted and accepted nothing."""
        if self._reason is not None:
            if self._reason is DisabledReason.DRAFT_NAN and record.drafts.num_asked:  # the last call before the rest
                self._forget_draft_kv()  # its NaN would be read again by each request with the same prefix
            return
        if record.num_accepted:
            self._num_fruitless = 0
            self._backoff_s = BACKOFF_S
        elif record.num_drafted:
            self._num_fruitless += 1
            if self._num_fruitless >= FRUITLESS_STEPS:
                self._disable(
                    DisabledReason.NO_ACCEPTANCE, f"no draft was accepted in {FRUITLESS_STEPS} steps in a row"
                )

    def _disable(self, reason: DisabledReason, message: str) -> None:
        log.error("%s; speculation is off for %g s", message, self._backoff_s)
        self._reason = reason
        self._num_disabled[reason] += 1
        self._retry_at_s = self._clock.now_s() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
        self._num_fruitless = self._num_empty = 0


def _asks_without_mask(plan: SchedulerOutput, drafts: DraftResult) -> bool:
    """Return True if some request was drafted for without a token mask, which may exclude all that a drafter can draw:
    a draft model's tokens may be those of another vocabulary, or fewer than the target's."""
    rows = plan.scheduled
    num_pending = rows.num_pending if drafts.num_free is None else rows.num_pending + drafts.num_free
    wants_drafts = (rows.max_model_drafts > num_pending) & (rows.counts[DRAFTERS] >> native.BY_MODEL & 1 != 0)
    wanting = [rows.requests[index].params for index in np.flatnonzero(wants_drafts).tolist()]
    num_masked = sum(params.guide is not None or params.allowed_token_ids is not None for params in wanting)
    return drafts.num_asked > num_masked  # some of those that want drafts were not asked, if rows ran short


class GuardedDrafter:
    """A drafting stage whose failures cost drafts, not requests."""

    def __init__(self, stage: DraftStage, guard: SpeculationGuard) -> None:
        self._stage = stage
        self._guard = guard

    def draft(self, plan: SchedulerOutput) -> DraftResult:
        if plan.is_drafting and self._guard.is_off_now():  # the plan may have been made before it was off
            return nothing_drafted(plan)
        try:
            drafts = self._stage.draft(plan)
        except Exception as error:
            self._guard.failed(error)
            return nothing_drafted(plan)
        self._guard.drafted(plan, drafts)
        return drafts


class GuardedPolicy:
    """A policy that wants no drafts, and learns nothing, while the guard keeps speculation off."""

    def __init__(self, inner: Policy, guard: SpeculationGuard) -> None:
        self._inner = inner
        self._guard = guard

    @property
    def name(self) -> str:
        return self._inner.name

    def plan(self, view: StepView) -> Decision:
        if self._guard.is_off_now():
            return Decision([0] * len(view.decoding))
        return self._inner.plan(view)

    def observe(self, stats: PlanStats) -> None:
        if not self._guard.is_off:
            self._inner.observe(stats)
