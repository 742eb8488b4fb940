"""A policy with a witness: counts what it decided and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from faser_trtllm.bench.policies.oracle import oracle_rows, oracle_step_ms
from faser_trtllm.bench.policies.stopwatch import Stopwatch
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import DraftPlan, ExitView, StepOutcome, StepView
from faser_trtllm.policy.base import Policy


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


class WatchedPolicy:
    """Policy (policy/base.py) that passes everything on to another one. start() forgets what was counted.

    clock: stands still while the witness itself takes time, and while an outcome is gathered for nobody else.
    """

    def __init__(self, inner: Policy, table: CostTable, clock: Stopwatch | None = None) -> None:
        self.inner = inner
        self._table = table
        self._clock = clock or Stopwatch()
        self._inner_wants = True
        self.start()

    def start(self) -> None:
        self.counts = Counts()
        self.timeline: list[TimelinePoint] = []

    @property
    def name(self) -> str:
        return self.inner.name

    def plan(self, view: StepView) -> DraftPlan:
        return self.inner.plan(view)

    def frontier_lengths(self, view: StepView, num_pending: Sequence[int]) -> list[int]:
        return self.inner.frontier_lengths(view, num_pending)

    def exit_boundaries(self, view: StepView, num_rows: int) -> Sequence[int]:
        return self.inner.exit_boundaries(view, num_rows)

    def keep_rows(self, view: StepView, exit_view: ExitView) -> list[int]:
        return self.inner.keep_rows(view, exit_view)

    def wants_outcome(self, is_speculative: bool) -> bool:
        self._inner_wants = self.inner.wants_outcome(is_speculative)
        if not self._inner_wants:
            self._clock.stop()
        return True

    def observe(self, outcome: StepOutcome) -> None:
        if self._inner_wants:
            self.inner.observe(outcome)
            self._clock.stop()
        self._count(outcome)
        self._clock.start()

    def _count(self, outcome: StepOutcome) -> None:
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
