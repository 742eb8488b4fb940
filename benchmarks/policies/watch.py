"""A witness of an executor's steps, which counts decisions and their results."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.policies.oracle import oracle_rows, oracle_step_ms
from benchmarks.policies.stopwatch import Stopwatch
from faser_trtllm import native
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.plan import StepRecord
from faser_trtllm.executor.stats import StepWatcher


@dataclass
class Counts:
    """Sums over steps that decoded; context rows are rows of prompts in the same passes."""

    num_steps: int = 0
    num_rows: int = 0
    num_context_rows: int = 0
    num_pruned: int = 0
    num_drafted: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    num_requests: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    step_ms: float = 0.0
    oracle_ms: float = 0.0
    modes: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)  # pending drafts of a request in a step


@dataclass(frozen=True)
class TimelinePoint:
    """One step: time, requests, pending drafts per request, committed tokens."""

    now_s: float
    num_requests: int
    draft_len: float
    num_tokens: int


class StepWitness(StepWatcher):
    """A watcher of an executor's steps since start(); its own time stops the clock."""

    def __init__(self, table: CostTable, clock: Stopwatch | None = None) -> None:
        self._table = table
        self._clock = clock
        self.start()

    def start(self) -> None:
        self.counts = Counts()
        self.timeline: list[TimelinePoint] = []

    def step(self, record: StepRecord) -> None:
        if self._clock is not None:
            self._clock.stop()
        self.count(record)
        if self._clock is not None:
            self._clock.start()

    def count(self, record: StepRecord) -> None:
        rows, drafts, result, counts = record.plan.scheduled, record.drafts, record.result, self.counts
        n = rows.num_decoding
        if n == 0:
            return
        num_tokens, accepted = oracle_rows(record), result.num_accepted[:n]
        pending = (rows.num_pending + drafts.num_new_drafts)[:n].tolist()
        counts.num_steps += 1
        counts.num_requests += n
        counts.num_rows += record.num_rows
        counts.num_context_rows += record.num_context_rows
        counts.num_pruned += record.num_pruned
        counts.num_drafted += record.num_drafted
        counts.num_tested += int((accepted + (result.outcome[:n] == native.RECOVERED)).sum())
        counts.num_accepted += int(accepted.sum())
        counts.num_tokens += num_tokens
        counts.draft_ms += drafts.draft_ms
        counts.verify_ms += result.verify_ms
        counts.step_ms += result.step_ms
        counts.oracle_ms += oracle_step_ms(record, self._table)
        counts.modes[record.plan.mode.value] += 1
        counts.lengths.update(pending)
        self.timeline.append(TimelinePoint(record.begun_s, n, sum(pending) / n, num_tokens))
