"""Sums of time and tokens over the steps of a plan, for the policy."""

from __future__ import annotations

from faser_trtllm.core.decision import Mode, PlanStats
from faser_trtllm.core.plan import DraftResult, StepRecord

SKIPPED_STEPS = 2  # after a change between drafting and not: missed tokens are run, and caches are cold

_MEASURES = {name for name in PlanStats.__dataclass_fields__ if name.endswith("ms")} | {"num_experts"}
_COUNTED = [name for name in PlanStats.__dataclass_fields__ if "late" not in name]
_LATE = [name for name in PlanStats.__dataclass_fields__ if "late" in name]


class PlanMeter:
    """Sums up steps: call begin_step() when one is scheduled, note() when it is over, take() before the next plan."""

    def __init__(self, max_draft_rows: int) -> None:
        """max_draft_rows: see SchedulerLimits."""
        self._max_draft_rows = max_draft_rows
        self._sums = dict.fromkeys(_COUNTED, 0.0)
        self._late = dict.fromkeys(_LATE, 0.0)  # of calls that ran missed tokens
        self._last: StepRecord | None = None  # the last noted step, if it counts; its ms are not known yet
        self._begun_s = 0.0
        self._num_skipped = 0
        self._was_drafting = False

    def begin_step(self, now_s: float) -> None:
        """Begin a step, which ends the one before."""
        if self._last is not None:
            self._add(self._last, 1e3 * (now_s - self._begun_s))
            self._last = None
        self._begun_s = now_s

    def rest(self) -> None:
        """Note that no work is left, so the time to the next step is not part of a step."""
        self._last = None

    def note(self, record: StepRecord) -> None:
        self._last = None
        plan, drafts, n = record.plan, record.drafts, record.plan.scheduled.num_decoding
        is_drafting = plan.runs_draft_model
        if is_drafting != self._was_drafting:
            self._was_drafting, self._num_skipped = is_drafting, 0
        if n == 0:
            return
        usual_rows = self._max_draft_rows * n
        is_late = drafts.num_asked > 0 and drafts.num_rows > usual_rows
        if is_late and plan.mode is Mode.SERIAL:
            self._add_late(drafts)
        if self._num_skipped < SKIPPED_STEPS:
            self._num_skipped += 1
        elif not is_late or drafts.num_rows <= usual_rows + record.num_context_rows:
            self._last = record

    def take(self) -> PlanStats:
        """Return the sums since the last call."""
        if not self._sums["num_steps"]:
            return PlanStats()
        sums = self._sums | self._late
        self._sums, self._late = dict.fromkeys(_COUNTED, 0.0), dict.fromkeys(_LATE, 0.0)
        return PlanStats(**{name: sums[name] if name in _MEASURES else int(sums[name]) for name in sums})  # type: ignore[arg-type]

    def _add(self, record: StepRecord, ms: float) -> None:
        sums, drafts, result = self._sums, record.drafts, record.result
        n = record.plan.scheduled.num_decoding
        sums["num_steps"] += 1
        sums["ms"] += ms
        if record.plan.mode is Mode.SERIAL:
            sums["draft_ms"] += drafts.draft_ms
            sums["verify_ms"] += result.verify_ms
        sums["num_tokens"] += record.num_decoded
        sums["num_requests"] += n
        sums["num_rows"] += n + record.num_verified + result.num_branches
        sums["num_verified"] += record.num_verified
        sums["num_pruned"] += record.num_pruned
        sums["num_accepted"] += sum(result.num_accepted[:n].tolist())
        sums["num_context_rows"] += record.num_context_rows
        sums["num_experts"] += result.num_experts
        if drafts.num_asked:
            num_steps, num_drafted = _of_model(drafts)
            sums["num_draft_calls"] += 1
            sums["num_draft_rows"] += drafts.num_rows
            sums["num_draft_steps"] += num_steps
            sums["num_drafted"] += num_drafted

    def _add_late(self, drafts: DraftResult) -> None:
        num_steps, num_drafted = _of_model(drafts)
        if num_steps:
            self._late["num_late_calls"] += 1
            self._late["num_late_rows"] += drafts.num_rows
            self._late["num_late_steps"] += num_steps
            self._late["num_late_drafted"] += num_drafted
            self._late["late_ms"] += drafts.draft_ms


def _of_model(drafts: DraftResult) -> tuple[int, int]:
    """Return the steps that the draft model took, and the drafts that it made."""
    new = drafts.num_new_drafts if drafts.num_free is None else drafts.num_new_drafts - drafts.num_free
    counts: list[int] = new.tolist()
    return max(counts), sum(counts)
