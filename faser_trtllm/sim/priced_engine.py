"""An engine that computes with another one and takes the time of a cost table, on a clock that only passes move."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.cost_table import ALL, CostTable
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.engine.base import Engine, EngineSpec


class PricedEngine:
    """The Engine protocol around `inner`, which it owns no part of: whoever opened that closes it.

    partition: where the passes run as far as the table is concerned; slowdown: by what runs beside them. The lanes of
    an overlapped step set both.
    """

    def __init__(self, inner: Engine, costs: CostTable, clock: ManualClock) -> None:
        self._inner = inner
        self._costs = costs
        self._clock = clock
        self._segment = 0  # the one that ran last
        self.num_runs = 0
        self.draft_engine: PricedEngine | None = None  # of a target: passes with none between them cost less
        self._num_draft_runs = 0
        self.partition = ALL
        self.slowdown = 1.0

    @property
    def spec(self) -> EngineSpec:
        return self._inner.spec

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        found = self._inner.run_segment(batch, segment)
        self._segment = segment
        self._take(self._costs.segment_ms(segment, batch.num_rows, batch.num_requests, _context_len(batch)))
        return found

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        found = self._inner.forward(batch)
        context_len = _context_len(batch)
        if self._is_plain(batch):
            self._take(self._costs.decode_ms(batch.num_requests, context_len))
        else:
            self._take(self._costs.verify_ms(batch.num_rows, batch.num_requests, context_len, self.partition))
        return found

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        self._inner.compact_rows(rows)

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        self._take(self._costs.exit_ms(self._segment + 1, rows.size))
        return self._inner.early_exit(rows, candidates)

    def draft(
        self,
        batch: RaggedBatch,
        sampling: npt.NDArray[np.void],
        num_tokens: npt.NDArray[np.int32],
        num_drafts: npt.NDArray[np.int32],
        num_new_drafts: npt.NDArray[np.int32],
        max_draft_len: int,
        stop: DraftStop | None = None,
    ) -> npt.NDArray[np.int32]:
        drafted = self._inner.draft(batch, sampling, num_tokens, num_drafts, num_new_drafts, max_draft_len, stop)
        costs, context_len = self._costs, _context_len(batch)
        ms = costs.draft_rows_ms(batch.num_rows, batch.num_requests, context_len, self.partition)
        for step in range(1, int(drafted.max(initial=0))):
            ms += costs.draft_step_ms(int(np.count_nonzero(drafted > step)), context_len, self.partition)
        self._take(ms)
        return drafted

    def close(self) -> None:
        """The inner engine is its owner's to close."""

    def __enter__(self) -> PricedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_plain(self, batch: RaggedBatch) -> bool:
        """A row per request, and nothing was drafted since the last pass."""
        num_runs = 0 if self.draft_engine is None else self.draft_engine.num_runs
        has_drafted, self._num_draft_runs = num_runs != self._num_draft_runs, num_runs
        return batch.num_rows == batch.num_requests and not has_drafted and self.partition == ALL

    def _take(self, ms: float) -> None:
        self.num_runs += 1
        self._clock.advance(1e-3 * ms * self.slowdown)


def _context_len(batch: RaggedBatch) -> float:
    """Tokens that a row of the batch attends to, in the mean."""
    return float(batch.positions.mean()) + 1.0
