"""Early pruning inside a verification pass: rows dropped between two segments.

The engine scores and drops (ops/prune_rows.py says which rows); what is dropped is carried, so a wrong exit costs
nothing but time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch, keep_rows
from faser_trtllm.core.decision import Exits
from faser_trtllm.core.plan import SchedulerOutput
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
        self, plan: SchedulerOutput, batch: RaggedBatch, frontiers: list[int]
    ) -> tuple[npt.NDArray[np.float32], list[int]]:
        """-> logits [num_logit_rows, >= vocab_size] of the rows that ran to the end, and rows dropped per decoding
        request, [] where none could be.

        frontiers[k]: drafts whose rows the pass starts with, for plan.view.decoding[k]; lowered in place.
        """
        exits = plan.exits
        num_segments = len(self._engine.spec.segments) - 1
        if exits is None or num_segments == 1 or not exits.boundaries or not any(frontiers):
            return self._engine.forward(batch), []
        entries = _batch_entries(plan)
        num_pruned = [0] * len(entries)
        logits = None
        for segment in range(num_segments):
            if segment in exits.boundaries and any(frontiers):
                batch = self._prune(plan, exits, batch, entries, frontiers, num_pruned, segment)
            logits = self._engine.run_segment(batch, segment)
        assert logits is not None
        return logits, num_pruned

    def _prune(
        self,
        plan: SchedulerOutput,
        exits: Exits,
        batch: RaggedBatch,
        entries: npt.NDArray[np.intp],
        frontiers: list[int],
        num_pruned: list[int],
        boundary: int,
    ) -> RaggedBatch:
        rows, sampling = plan.scheduled, self._sampling.array
        slots, num_tokens = [rows.slots[i] for i in plan.verified], [rows.num_tokens[i] for i in plan.verified]
        candidates, places = exit_drafts(sampling, slots, num_tokens, frontiers)
        counts, starts = np.diff(batch.cu_rows), batch.cu_rows[:-1]
        boundary_batch = PruneBatch(
            starts[entries],
            1 + np.array(frontiers, np.int32),
            candidates,
            places,
            batch.num_rows,
            exits.rule(sampling, slots, num_tokens, frontiers, boundary),
        )
        kept = self._engine.prune(boundary_batch)
        dropped = boundary_batch.num_rows - kept
        if not dropped.any():
            return batch
        counts[entries] -= dropped
        for k, count in enumerate(dropped.tolist()):
            frontiers[k] -= count
            num_pruned[k] += count
        return keep_rows(batch, kept_rows(boundary_batch, kept), counts.tolist())


def _batch_entries(plan: SchedulerOutput) -> npt.NDArray[np.intp]:
    """Entry k is the batch entry of plan.view.decoding[k]; requests without rows have none."""
    has_rows = np.array(plan.scheduled.num_new_tokens) > 0
    entries: npt.NDArray[np.intp] = (np.cumsum(has_rows) - 1)[list(plan.verified)]
    return entries
