"""An engine that computes with another one and counts the experts that a synthetic router gives to its passes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.base import Engine
from faser_trtllm.engine.delegating_engine import DelegatingEngine
from faser_trtllm.simulation.router import SyntheticRouter


class RoutedEngine(DelegatingEngine):
    """A request's rows are routed by its slot and their positions, drafts as the text in their places."""

    def __init__(self, inner: Engine, router: SyntheticRouter) -> None:
        super().__init__(inner)
        self._router = router
        self._counts = [0.0]  # of the pass's segments so far

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
