"""An engine that computes with a wrapped one and advances a clock by a cost table."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.cost_table import ALL, CostTable
from faser_trtllm.engine.base import DraftBatch, Engine
from faser_trtllm.policy.modes import DRAFT, VERIFY
from lab.clock import ManualClock
from lab.costmodel.measured import MeasuredGpu
from lab.costmodel.traffic import Traffic, Work, side_by_side
from lab.delegating_engine import DelegatingEngine

PassTimes: TypeAlias = CostTable | MeasuredGpu


class RunningDraft:
    """The remaining time of a draft while the target runs passes."""

    def __init__(self, work: Work, costs: PassTimes) -> None:
        self.rest = work
        self._costs = costs
        self._traffic = Traffic.of(costs.traffic)

    def run(self, verify: Work) -> float:
        """Return the ms of a pass that starts now, and reduce the draft's remaining time."""
        rest_ms, verify_ms = side_by_side(self.rest.ms, verify.ms, self._slowdowns(verify))
        left_ms = max(0.0, rest_ms - verify_ms)
        self.rest = Work(left_ms, self.rest.gb * left_ms / self.rest.ms if self.rest.ms else 0.0)
        return verify_ms

    def _slowdowns(self, verify: Work) -> tuple[float, float]:
        if self._traffic is not None:
            return self._traffic.slowdowns(self.rest, DRAFT, verify, VERIFY)
        pair = self._costs.interference_of(DRAFT, VERIFY)
        return (pair.draft_factor, pair.verify_factor) if pair else (1.0, 1.0)


class PricedEngine(DelegatingEngine):
    """An engine that runs `inner` and advances the clock by the table's cost of each call.

    role: "target" or "draft". partition: the table's partition for the passes. concurrent: the draft that runs at the
    same time. The draft worker sets the latter two in an overlapped step.
    """

    def __init__(self, inner: Engine, costs: PassTimes, clock: ManualClock, role: str = "target") -> None:
        super().__init__(inner)
        self._role = role
        self._costs = costs
        self._traffic = Traffic.of(costs.traffic)
        self._clock = clock
        self._segment = 0  # the last segment that ran
        self.num_runs = 0
        self.draft_engine: PricedEngine | None = None  # of a target, whose consecutive passes cost less
        self._num_draft_runs = 0
        self.partition = ALL
        self.concurrent: RunningDraft | None = None
        self.taken = Work(0.0, 0.0)

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        before = self.distinct_experts if segment else 0.0
        found = self._inner.run_segment(batch, segment)
        self._segment = segment
        layers = np.diff(self.spec.segments)[: segment + 1]
        experts = float((layers.sum() * self.distinct_experts - layers[:-1].sum() * before) / layers[-1])
        ms, whole_ms = self._segment_ms(segment, batch, experts), self._verify_ms(batch, ALL, experts)
        gb = self._gb(batch.num_requests, _context_len(batch)) * ms / whole_ms
        if self.partition != ALL:  # segments were measured on all cores only
            ms *= self._verify_ms(batch, self.partition, experts) / whole_ms
        self._take(ms, gb)
        return found

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        found = self._inner.forward(batch)
        context_len = _context_len(batch)
        if self._is_plain(batch):
            ms = self._decode_ms(batch)
        else:
            ms = self._verify_ms(batch, self.partition, self.distinct_experts)
        self._take(ms, self._gb(batch.num_requests, context_len))
        return found

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        self._take(self._costs.exit_ms(self._segment + 1, rows.size))
        return self._inner.early_exit(rows, candidates)

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        batch = draft_batch.batch
        drafted = self._inner.draft(draft_batch)
        costs, context_len = self._costs, _context_len(batch)
        ms = costs.draft_rows_ms(batch.num_rows, batch.num_requests, context_len, self.partition)
        gb = self._gb(batch.num_requests, context_len)
        for step in range(1, int(drafted.max(initial=0))):
            drafting = int(np.count_nonzero(drafted > step))
            ms += costs.draft_step_ms(drafting, context_len, self.partition)
            if not self.spec.block_size:  # a block's further drafts are draws
                gb += self._gb(drafting, context_len)
        self._take(ms, gb)
        return drafted

    def _verify_ms(self, batch: RaggedBatch, partition: str, num_experts: float) -> float:
        sizes = batch.num_rows, batch.num_requests, _context_len(batch), partition
        counted = self._counted
        return self._costs.verify_ms(*sizes) if counted is None else counted.verify_ms(*sizes, num_experts)

    def _decode_ms(self, batch: RaggedBatch) -> float:
        sizes = batch.num_requests, _context_len(batch)
        counted = self._counted
        return self._costs.decode_ms(*sizes) if counted is None else counted.decode_ms(*sizes, self.distinct_experts)

    def _segment_ms(self, segment: int, batch: RaggedBatch, num_experts: float) -> float:
        """Return the ms of a segment. num_experts: of the segment; `inner` counts those of the pass so far."""
        sizes = segment, batch.num_rows, batch.num_requests, _context_len(batch)
        counted = self._counted
        return self._costs.segment_ms(*sizes) if counted is None else counted.segment_ms(*sizes, num_experts)

    @property
    def _counted(self) -> CostTable | None:
        """The cost table if `inner` counts the experts of its passes, else None."""
        return self._costs if isinstance(self._costs, CostTable) and self.distinct_experts else None

    def _is_plain(self, batch: RaggedBatch) -> bool:
        """Return True for one row per request if nothing was drafted since the last call of this method."""
        num_runs = 0 if self.draft_engine is None else self.draft_engine.num_runs
        has_drafted, self._num_draft_runs = num_runs != self._num_draft_runs, num_runs
        return batch.num_rows == batch.num_requests and not has_drafted and self.partition == ALL

    def _gb(self, num_requests: int, context_len: float) -> float:
        """Return the GB that a pass moves; 0 if unknown."""
        return 0.0 if self._traffic is None else self._traffic.of_pass(self._role, num_requests, context_len)

    def _take(self, ms: float, gb: float = 0.0) -> None:
        self.num_runs += 1
        self.taken = Work(self.taken.ms + ms, self.taken.gb + gb)
        if self.concurrent is not None:
            ms = self.concurrent.run(Work(ms, gb))
        self._clock.advance(1e-3 * ms)


def _context_len(batch: RaggedBatch) -> float:
    """Return the mean context of the batch's requests, not rows: prompts have many rows with few tokens."""
    return float(batch.positions[batch.cu_rows[1:] - 1].mean()) + 1.0
