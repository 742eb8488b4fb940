"""Counters of the executor; written by the executor's thread only."""

from __future__ import annotations

from collections import Counter, defaultdict

from faser_trtllm.core.plan import DraftResult, SchedulerOutput, VerifyResult
from faser_trtllm.core.request import Request


class ExecutorStats:
    """Sums since the start. Acceptance counts drafts whose rows ran: accepted / verified."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()
        self._ms: defaultdict[str, float] = defaultdict(float)

    def record(
        self,
        plan: SchedulerOutput,
        drafts: DraftResult,
        result: VerifyResult,
        times_s: tuple[float, float, float, float, float],
    ) -> None:
        """times_s: start of the step, then the ends of schedule, draft, verify and update."""
        num, ms = self._num, self._ms
        num["num_steps"] += 1
        num["num_draft_tokens"] += sum(drafts.num_new_drafts)
        num["num_verified_tokens"] += sum(result.num_verified)
        num["num_accepted_tokens"] += sum(result.num_accepted)
        num["num_output_tokens"] += sum(result.num_tokens)
        num["num_rows"] += sum(s.num_new_tokens for s in plan.scheduled) + sum(result.num_verified)
        start, scheduled, drafted, verified, updated = times_s
        ms["schedule_ms"] += 1e3 * (scheduled - start)
        ms["draft_ms"] += 1e3 * (drafted - scheduled)
        ms["verify_ms"] += 1e3 * (verified - drafted)
        ms["update_ms"] += 1e3 * (updated - verified)

    def record_finished(self, request: Request) -> None:
        self._num["num_finished_requests"] += 1
        self._num["num_prompt_tokens"] += request.prompt_len
        self._num["num_preemptions"] += request.stats.num_preemptions

    def as_dict(self) -> dict[str, float]:
        keys = (
            "num_steps",
            "num_rows",
            "num_output_tokens",
            "num_draft_tokens",
            "num_verified_tokens",
            "num_accepted_tokens",
            "num_finished_requests",
            "num_prompt_tokens",
            "num_preemptions",
        )
        times = ("schedule_ms", "draft_ms", "verify_ms", "update_ms")
        counts: dict[str, float] = {key: self._num[key] for key in keys}
        return counts | {key: self._ms[key] for key in times}
