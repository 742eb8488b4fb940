"""Early pruning inside a verification pass: rows dropped between two segments.

At a boundary every running row j of a request scores the draft's candidates for the next token with the target's own
intermediate hidden row (FASER's Top-K signal). Rows behind a draft that is likely to be rejected are dropped; the row
that would test it stays, so a wrong exit costs nothing but time: the free test decides and the rest is carried.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch, keep_rows
from faser_trtllm.core.decision import ExitView
from faser_trtllm.core.plan import SchedulerOutput
from faser_trtllm.engine.base import Engine
from faser_trtllm.ops.early_exit import rank_and_gap
from faser_trtllm.policy.base import Policy


class Pruner:
    """Runs a pass segment by segment."""

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self._engine = engine
        self._policy = policy

    def forward(
        self, plan: SchedulerOutput, batch: RaggedBatch, frontiers: list[int]
    ) -> tuple[npt.NDArray[np.float32], list[int]]:
        """-> logits [num_logit_rows, >= vocab_size] of the rows that ran to the end, and rows dropped per decoding
        request, [] where none could be.

        frontiers[k]: drafts whose rows the pass starts with, for plan.view.decoding[k]; lowered in place.
        """
        boundaries = self._policy.exit_boundaries(plan.view, batch.num_rows) if any(frontiers) else ()
        num_segments = len(self._engine.spec.segments) - 1
        if not boundaries or num_segments == 1:
            return self._engine.forward(batch), []
        entries = _batch_entries(plan)
        num_pruned = [0] * len(entries)
        logits = None
        for segment in range(num_segments):
            if segment in boundaries and any(frontiers):
                batch = self._prune(plan, batch, entries, frontiers, num_pruned, segment)
            logits = self._engine.run_segment(batch, segment)
        assert logits is not None
        return logits, num_pruned

    def _prune(
        self,
        plan: SchedulerOutput,
        batch: RaggedBatch,
        entries: list[int],
        frontiers: list[int],
        num_pruned: list[int],
        boundary: int,
    ) -> RaggedBatch:
        view = self._exit_view(plan, batch, entries, frontiers, boundary)
        kept = self._policy.keep_rows(plan.view, view)
        counts = np.diff(batch.cu_rows)
        for k, entry in enumerate(entries):
            dropped = 1 + frontiers[k] - max(1, min(kept[k], 1 + frontiers[k]))
            frontiers[k] -= dropped
            num_pruned[k] += dropped
            counts[entry] -= dropped
        if int(counts.sum()) == batch.num_rows:
            return batch
        starts = batch.cu_rows[:-1]
        rows = np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, counts, strict=True)])
        self._engine.compact_rows(rows)
        return keep_rows(batch, rows, counts.tolist())

    def _exit_view(
        self, plan: SchedulerOutput, batch: RaggedBatch, entries: list[int], frontiers: list[int], boundary: int
    ) -> ExitView:
        rows, candidates, places = [], [], []
        for k, entry in enumerate(entries):
            request = plan.view.decoding[k]
            first, length = request.num_tokens, frontiers[k]
            start = int(batch.cu_rows[entry])
            rows.append(np.arange(start, start + length, dtype=np.int32))
            ids = request.draft_candidates[first : first + length]
            candidates.append(ids)
            places.append((ids == request.tokens[first : first + length, None]).argmax(1))
        scores = self._engine.early_exit(np.concatenate(rows), np.concatenate(candidates))
        rank, gap = rank_and_gap(scores, np.concatenate(places))
        ends = np.cumsum(frontiers)[:-1]
        num_decoding_rows = len(entries) + sum(frontiers)
        return ExitView(
            boundary,
            [1 + length for length in frontiers],
            np.split(rank, ends),
            np.split(gap, ends),
            batch.num_rows - num_decoding_rows,
        )


def _batch_entries(plan: SchedulerOutput) -> list[int]:
    """Entry k is the batch entry of plan.view.decoding[k]: whoever runs no rows has none."""
    with_rows = [index for index, scheduled in enumerate(plan.scheduled) if scheduled.num_new_tokens]
    entries = {index: entry for entry, index in enumerate(with_rows)}
    return [entries[index] for index in plan.verified]
