"""A witness of an executor's steps: counts what was decided and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.policies.oracle import oracle_rows, oracle_step_ms
from benchmarks.policies.stopwatch import Stopwatch
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import StepOutcome
from faser_trtllm.core.plan import DraftResult, SchedulerOutput, VerifyResult
from faser_trtllm.core.request import Request
from faser_trtllm.scheduler.outcome import step_outcome


@dataclass
class Counts:
    """Sums over steps that decoded; context rows are prompts in the same passes."""

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
    """One step: when, how many requests, how many drafts were pending per request, tokens committed."""

    now_s: float
    num_requests: int
    draft_len: float
    num_tokens: int


class StepWitness:
    """Watches an executor's steps (executor/stats.py StepWatcher). start() forgets what was counted.

    clock: stands still while the witness itself takes time.
    """

    def __init__(self, table: CostTable, clock: Stopwatch | None = None) -> None:
        self._table = table
        self._clock = clock
        self.start()

    def start(self) -> None:
        self.counts = Counts()
        self.timeline: list[TimelinePoint] = []

    def step(
        self,
        plan: SchedulerOutput,
        drafts: DraftResult,
        result: VerifyResult,
        times_s: tuple[float, float, float, float],
    ) -> None:
        if self._clock is not None:
            self._clock.stop()
        if plan.view.decoding:
            self.count(step_outcome(plan, drafts, result))
        if self._clock is not None:
            self._clock.start()

    def finished(self, request: Request) -> None:
        """Nothing is counted by request."""

    def count(self, outcome: StepOutcome) -> None:
        n, counts = len(outcome.decoding), self.counts
        if n == 0:
            return
        num_tokens = oracle_rows(outcome)
        counts.num_steps += 1
        counts.num_requests += n
        counts.num_rows += outcome.num_rows
        counts.num_context_rows += outcome.num_context_rows
        counts.num_pruned += sum(outcome.num_pruned)
        counts.num_drafted += outcome.num_drafted
        counts.num_tested += sum(outcome.num_tested)
        counts.num_accepted += sum(outcome.num_accepted)
        counts.num_tokens += num_tokens
        counts.draft_ms += outcome.draft_ms
        counts.verify_ms += outcome.verify_ms
        counts.step_ms += outcome.step_ms
        counts.oracle_ms += oracle_step_ms(outcome, self._table)
        counts.modes[outcome.mode.value] += 1
        counts.lengths.update(outcome.num_pending)
        self.timeline.append(TimelinePoint(outcome.now_s, n, sum(outcome.num_pending) / n, num_tokens))
