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
        times_s: tuple[float, float, float, float],
    ) -> None:
        """times_s: start of the step, then the ends of schedule, of drafting and verification, and of update."""
        num, ms = self._num, self._ms
        num["num_steps"] += 1
        num["num_draft_tokens"] += sum(drafts.num_new_drafts)
        num["num_verified_tokens"] += sum(result.num_verified)
        num["num_accepted_tokens"] += sum(result.num_accepted)
        num["num_output_tokens"] += sum(result.num_tokens)
        num["num_rows"] += sum(s.num_new_tokens for s in plan.scheduled) + sum(result.num_verified)
        num["num_pruned_rows"] += sum(result.num_pruned)
        num[f"num_steps_{plan.mode.value}"] += 1
        start, scheduled, verified, updated = times_s
        ms["schedule_ms"] += 1e3 * (scheduled - start)
        ms["draft_ms"] += drafts.draft_ms
        ms["verify_ms"] += result.verify_ms
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
            "num_pruned_rows",
            "num_steps_serial",
            "num_steps_draft_ahead",
            "num_steps_ping_pong",
        )
        times = ("schedule_ms", "draft_ms", "verify_ms", "update_ms")
        counts: dict[str, float] = {key: self._num[key] for key in keys}
        return counts | {key: self._ms[key] for key in times}
