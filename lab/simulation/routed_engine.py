"""An engine that computes with a wrapped one and counts experts by a synthetic router."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.base import Engine
from lab.delegating_engine import DelegatingEngine
from lab.simulation.router import SyntheticRouter


class RoutedEngine(DelegatingEngine):
    """An engine whose rows are routed by slot and position, drafts like text at their positions."""

    def __init__(self, inner: Engine, router: SyntheticRouter) -> None:
        super().__init__(inner)
        self._router = router
        self._counts = [0.0]  # distinct experts in each segment of the pass so far

    @property
    def distinct_experts(self) -> float:
        return float(np.average(self._counts, weights=np.diff(self.spec.segments)[: len(self._counts)]))

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        self._counts = [self._count(batch)]
        return self._inner.forward(batch)

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        self._counts = [*(self._counts if segment else []), self._count(batch)]
        return self._inner.run_segment(batch, segment)

    def _count(self, batch: RaggedBatch) -> float:
        slots = np.repeat(batch.slots, np.diff(batch.cu_rows))
        return self._router.distinct(slots, batch.positions)
