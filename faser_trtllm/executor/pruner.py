"""Early pruning in a verification pass: rows are dropped between two segments.

The engine scores and drops rows as ops/prune_rows.py decides. Dropped drafts stay pending, so a wrong exit costs only
time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch, keep_rows
from faser_trtllm.core.counts import Int32Array
from faser_trtllm.core.decision import Exits
from faser_trtllm.core.plan import ScheduledRequests, SchedulerOutput
from faser_trtllm.engine.base import Engine
from faser_trtllm.ops.prune_rows import PruneBatch, kept_rows
from faser_trtllm.ops.requests.exit_drafts import exit_drafts
from faser_trtllm.sampling.table import SamplingTable


class Pruner:
    """Runs a pass segment by segment."""

    def __init__(self, engine: Engine, sampling: SamplingTable) -> None:
        self._engine = engine
        self._sampling = sampling

    def forward(
        self, plan: SchedulerOutput, batch: RaggedBatch, num_verified: Int32Array
    ) -> tuple[npt.NDArray[np.float32], Int32Array | None]:
        """Return the logits [num_logit_rows, >= vocab_size] of rows that ran to the end, and the number of rows dropped
        per request [num_requests], None if none could be.

        num_verified [num_requests]: drafts whose rows the pass starts with; lowered in place.
        """
        exits, rows = plan.decision.exits, plan.scheduled
        num_segments = len(self._engine.spec.segments) - 1
        if exits is None or num_segments == 1 or not exits.boundaries or not num_verified.any():
            return self._engine.forward(batch), None
        begun_with, logits = num_verified.copy(), None
        for segment in range(num_segments):
            if segment in exits.boundaries and num_verified.any():
                batch = self._prune(rows, exits, batch, num_verified[: rows.num_decoding], segment)
            logits = self._engine.run_segment(batch, segment)
        assert logits is not None
        return logits, begun_with - num_verified

    def _prune(
        self, rows: ScheduledRequests, exits: Exits, batch: RaggedBatch, num_verified: Int32Array, boundary: int
    ) -> RaggedBatch:
        n, sampling = rows.num_decoding, self._sampling.array
        columns = (rows.slots[:n], rows.num_tokens[:n], num_verified)
        candidates, places = exit_drafts(sampling, *columns)
        starts, counts = batch.cu_rows[:n], np.diff(batch.cu_rows)
        rule = exits.rule(sampling, *columns, boundary)
        boundary_batch = PruneBatch(starts, 1 + num_verified, candidates, places, batch.num_rows, rule)
        kept = self._engine.prune(boundary_batch)
        dropped = boundary_batch.num_rows - kept
        if not dropped.any():
            return batch
        counts[:n] -= dropped
        num_verified -= dropped
        return keep_rows(batch, kept_rows(boundary_batch, kept), counts)
