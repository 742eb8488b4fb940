"""Base class of engine wrappers: delegates every call to the inner engine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.closing import Closing
from faser_trtllm.engine.base import DraftBatch, Engine, EngineSpec
from faser_trtllm.ops.prune_rows import HostPruning


class DelegatingEngine(HostPruning, Closing):
    """The Engine protocol around `inner`, which the caller owns and closes."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    @property
    def spec(self) -> EngineSpec:
        return self._inner.spec

    @property
    def distinct_experts(self) -> float:
        return self._inner.distinct_experts

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        return self._inner.run_segment(batch, segment)

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        return self._inner.forward(batch)

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        self._inner.compact_rows(rows)

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return self._inner.early_exit(rows, candidates)

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        return self._inner.draft(draft_batch)

    def close(self) -> None:
        """Do nothing: the owner closes the inner engine."""
