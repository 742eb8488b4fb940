"""Counters and histograms of the executor; written only by its thread, readable from any."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import or_

from faser_trtllm.core.decision import Mode
from faser_trtllm.core.plan import ScheduledRequests, StepRecord
from faser_trtllm.core.request import FinishReason, Request

LATENCY_BUCKETS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
LENGTH_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)  # those of TensorRT-LLM's nv_llm_*_token_len

HISTOGRAMS = {
    "queue_time_s": LATENCY_BUCKETS_S,
    "time_to_first_token_s": LATENCY_BUCKETS_S,
    "inter_token_latency_s": LATENCY_BUCKETS_S,
    "time_per_output_token_s": LATENCY_BUCKETS_S,
    "e2e_latency_s": LATENCY_BUCKETS_S,
    "input_token_len": LENGTH_BUCKETS,
    "output_token_len": LENGTH_BUCKETS,
}
"""Upper bounds of each histogram's buckets; one more bucket takes larger values."""

_COUNTS = (
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
    "num_branch_rows",
    "num_branch_tokens",
    "num_drafts",
    "num_verified_rows",
    "num_oracle_rows",
    "num_prefix_tokens",
    "num_prefix_hit_tokens",
    *(f"num_steps_{mode.value}" for mode in Mode),
)
_LAST_STEP = (
    "num_scheduled",
    "num_context_requests",
    "num_generation_requests",
    "num_context_tokens",
    "num_paused",
)
_TIMES = ("schedule_ms", "draft_ms", "free_draft_ms", "verify_ms", "update_ms")


@dataclass(frozen=True, slots=True)
class Progress:
    """Shows whether an executor makes progress: it hangs if it has work and its last step began or ended long ago."""

    num_steps: int = 0
    has_work: bool = False
    age_s: float = 0.0  # since the last step began or ended, or work arrived at the idle executor
    slow_step_s: float = 0.0  # SlowSteps.slow_s

    @property
    def stalled_s(self) -> float:
        """Seconds without progress while there is work; 0 without work."""
        return self.age_s if self.has_work else 0.0


class StepWatcher:
    """A listener called on the executor's thread; it must neither block nor raise."""

    def step(self, record: StepRecord) -> None:
        """Handle a step that has ended and whose tokens were delivered."""

    def finished(self, request: Request) -> None:
        """Handle the end of a request; if a step ended it, step() is called afterwards."""


class Histogram:
    """Count and sum of values in each bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sums = [0.0] * (len(bounds) + 1)

    def observe(self, value: float, num_values: int = 1) -> None:
        """Count the same value num_values times."""
        place = bisect_left(self._bounds, value)
        self.counts[place] += num_values
        self.sums[place] += num_values * value


class ExecutorStats(StepWatcher):
    """Sums since the start. A draft is verified on the row before its own, so more may be accepted than had rows."""

    def __init__(self, max_draft_len: int = 0) -> None:
        self._max_draft_len = max_draft_len
        self._num = dict.fromkeys(_COUNTS, 0)  # a Counter would be three times slower
        self._ms = dict.fromkeys(_TIMES, 0.0)
        self._accepted_lens = [0] * (max_draft_len + 1)
        self._verified_lens = [0] * (max_draft_len + 1)
        self._histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self._last_token_s: dict[Request, float] = {}
        self._ended: list[Request] = []  # since the last step
        self._steady: Sequence[Request] = ()  # requests of a held plan, whose last tokens all came at _steady_s
        self._steady_s = 0.0
        self._last: StepRecord | None = None  # None while no request is left, whose memory it would keep
        self._last_counts = dict.fromkeys(_LAST_STEP, 0.0)

    def step(self, record: StepRecord) -> None:
        num, ms = self._num, self._ms
        plan, drafts, result = record.plan, record.drafts, record.result
        n = plan.scheduled.num_decoding
        num["num_steps"] += 1
        pending = plan.scheduled.num_pending + drafts.num_new_drafts
        if any(pending.tolist()):
            num["num_draft_tokens"] += result.num_settled(pending)
        num["num_verified_tokens"] += record.num_verified
        num["num_accepted_tokens"] += record.num_accepted
        num["num_output_tokens"] += record.num_tokens
        num["num_rows"] += record.num_rows
        num["num_branch_rows"] += result.num_branches
        num["num_branch_tokens"] += result.num_followed
        num["num_pruned_rows"] += record.num_pruned
        num["num_verified_rows"] += n + record.num_verified
        num["num_oracle_rows"] += record.num_decoded
        num["num_steps_" + plan.mode] += 1
        verified, accepted = result.num_verified.tolist(), result.num_accepted.tolist()
        for lengths, totals in ((verified[:n], self._verified_lens), (accepted, self._accepted_lens)):
            for length, count in Counter(lengths).items():
                totals[length] += count
        num["num_drafts"] += len(accepted) - list(map(or_, verified, accepted)).count(0)
        ms["schedule_ms"] += 1e3 * (record.scheduled_s - record.begun_s)
        ms["draft_ms"] += drafts.draft_ms
        ms["free_draft_ms"] += drafts.free_ms
        ms["verify_ms"] += result.verify_ms
        ms["update_ms"] += 1e3 * (record.updated_s - record.verified_s)
        for request in plan.admitted:
            self._record_admitted(request)
        self._record_tokens(plan.scheduled, result.num_tokens.tolist(), record.updated_s)
        self._last = record

    def rest(self) -> None:
        """Note that no request is left: keep the counts of the last step, but not its requests."""
        self._last_counts, self._last = self._last_step(), None
        self._last_token_s.clear()
        self._ended.clear()
        self._steady = ()

    def finished(self, request: Request) -> None:
        num, stats = self._num, request.stats
        num["num_finished_requests"] += 1
        num["num_preemptions"] += stats.num_preemptions
        self._ended.append(request)
        if stats.first_token_s is None or stats.last_token_s is None:
            return
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            histograms, num_output = self._histograms, request.num_output_tokens
            histograms["e2e_latency_s"].observe(stats.last_token_s - request.arrival_s)
            histograms["input_token_len"].observe(request.prompt_len)
            histograms["output_token_len"].observe(num_output)
            if num_output > 1:
                per_token_s = (stats.last_token_s - stats.first_token_s) / (num_output - 1)
                histograms["time_per_output_token_s"].observe(per_token_s)

    def as_dict(self) -> dict[str, float]:
        """Return the counts, and the batch of the last step.

        Keys with several values are name[index], by draft position, number of verified drafts or histogram bucket (and
        name_sum[index], the sum of the bucket's values).
        """
        values: dict[str, float] = self._num | self._ms
        at_least = 0
        for length in range(self._max_draft_len, 0, -1):
            at_least += self._accepted_lens[length]
            values[f"num_accepted_tokens_per_pos[{length - 1}]"] = at_least
        for length in range(self._max_draft_len + 1):
            values[f"num_verified_by_len[{length}]"] = self._verified_lens[length]
        for name, histogram in self._histograms.items():
            values |= {f"{name}[{i}]": count for i, count in enumerate(histogram.counts)}
            values |= {f"{name}_sum[{i}]": total for i, total in enumerate(histogram.sums)}
        return values | self._last_step()

    def _record_admitted(self, request: Request) -> None:
        stats = request.stats
        if stats.num_preemptions or stats.first_scheduled_s is None:
            return  # counted at its first admission
        self._histograms["queue_time_s"].observe(stats.first_scheduled_s - request.arrival_s)
        self._num["num_prefix_tokens"] += request.prompt_len
        self._num["num_prefix_hit_tokens"] += stats.num_cached_tokens

    def _record_tokens(self, rows: ScheduledRequests, num_tokens: Sequence[int], now_s: float) -> None:
        """Record token latencies; requests whose previous token came from the same step share a value. num_tokens: of
        the first num_sampled requests."""
        last_token_s, inter_token = self._last_token_s, self._histograms["inter_token_latency_s"]
        if rows.requests is self._steady and not self._ended and 0 not in num_tokens:
            inter_token.observe(now_s - self._steady_s, len(self._steady))
            self._steady_s = now_s
            return
        last_token_s.update(dict.fromkeys(self._steady, self._steady_s))
        requests = [r for r, count in zip(rows.requests, num_tokens, strict=False) if count]
        times = [last_token_s.get(request) for request in requests]
        for last_s in set(times):
            if last_s is not None:
                inter_token.observe(now_s - last_s, times.count(last_s))
        if None in times:
            for request in requests:
                if request not in last_token_s:
                    self._num["num_prompt_tokens"] += request.prompt_len
                    self._histograms["time_to_first_token_s"].observe(now_s - request.arrival_s)
        last_token_s.update(dict.fromkeys(requests, now_s))
        for request in self._ended:
            last_token_s.pop(request, None)
        is_steady = len(requests) == len(rows) and not self._ended
        self._steady, self._steady_s = rows.requests if is_steady else (), now_s
        self._ended.clear()

    def _last_step(self) -> dict[str, float]:
        last = self._last  # once, since other threads ask while rest() clears it
        if last is None:
            return self._last_counts
        rows = last.plan.scheduled
        num_contexts = rows.num_running - rows.num_decoding
        return {
            "num_scheduled": len(rows),
            "num_context_requests": num_contexts,
            "num_generation_requests": len(rows) - num_contexts,
            "num_context_tokens": last.num_context_rows,
            "num_paused": len(last.plan.paused),
        }
