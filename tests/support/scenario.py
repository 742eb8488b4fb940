"""Ragged passes over several requests, as an executor would run them, compared with the torch reference.

A step gives each request some rows: true tokens, then wrong ones, as drafts that will be rejected. Rows are dropped at
every boundary, fewer are accepted than survived, and later steps overwrite what was left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faser_trtllm.core.batch import BatchBuilder, keep_rows
from faser_trtllm.engine.base import Engine
from faser_trtllm.models.reference import ReferenceModel


@dataclass(frozen=True)
class Rows:
    """A request's share of a step. num_true rows continue its sequence, num_wrong follow. kept: rows left after each
    boundary. num_accepted: how far the sequence advances. restart: first forget the request, and begin another."""

    slot: int
    num_true: int
    num_wrong: int = 0
    kept: tuple[int, ...] = ()
    num_accepted: int | None = None
    restart: bool = False


Step = Sequence[Rows]

# A prompt in chunks beside verification frontiers of different lengths, with idle slots and a slot that is used again.
RAGGED: tuple[Step, ...] = (
    (Rows(2, 9), Rows(0, 5)),
    (Rows(0, 1, 3, kept=(3, 2)), Rows(2, 11), Rows(1, 7)),
    (Rows(1, 1, 4, kept=(4, 1)), Rows(0, 2, 2, kept=(4, 4), num_accepted=1)),
    (Rows(2, 2, 3, kept=(1, 1)), Rows(3, 20), Rows(0, 3, 1, kept=(2, 2), num_accepted=2)),
    (Rows(0, 4, restart=True), Rows(3, 1), Rows(1, 3, 2)),
    (Rows(3, 2), Rows(2, 1, 6, kept=(7, 2)), Rows(1, 1), Rows(0, 2)),
)


class Scenario:
    """Requests over an engine whose blocks are whole sequences; block ids and batch order are shuffled."""

    def __init__(self, engine: Engine, reference: ReferenceModel, seed: int = 0) -> None:
        self.engine = engine
        self.reference = reference
        self._rng = np.random.default_rng(seed)
        spec = engine.spec
        self.block_table = self._rng.permutation(spec.num_blocks).astype(np.int32).reshape(-1, 1)
        self._builder = BatchBuilder(self.block_table)
        self.committed: list[list[int]] = [[] for _ in range(spec.max_batch_size)]

    def step(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Run one pass -> logits of the rows that reached the end, and the reference's."""
        self._builder.clear()
        true_tokens, sequences = [], []
        for rows in step:
            if rows.restart:
                self.committed[rows.slot] = []
            new = self._rng.integers(0, self.engine.spec.vocab_size, rows.num_true + rows.num_wrong).tolist()
            done = self.committed[rows.slot]
            sequences.append([*done, *new])
            true_tokens.append(new[: rows.num_true])
            self._builder.add(rows.slot, np.array(sequences[-1], np.int32), len(done), len(sequences[-1]), len(new))
        batch = self._builder.build()
        num_kept = [rows.num_true + rows.num_wrong for rows in step]
        logits = None
        num_segments = len(self.engine.spec.segments) - 1
        for segment in range(num_segments):
            if segment:
                wanted = [
                    rows.kept[segment - 1] if rows.kept else count for rows, count in zip(step, num_kept, strict=True)
                ]
                starts = batch.cu_rows[:-1]
                keep = [np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, wanted, strict=True)]
                self.engine.compact_rows(np.concatenate(keep))
                batch, num_kept = keep_rows(batch, np.concatenate(keep), wanted), wanted
            logits = self.engine.run_segment(batch, segment)
        assert logits is not None
        expected = []
        for rows, tokens, sequence, count in zip(step, true_tokens, sequences, num_kept, strict=True):
            done = self.committed[rows.slot]
            expected.append(self.reference.logits(sequence)[len(done) : len(done) + count].numpy())
            accepted = min(rows.num_true, count) if rows.num_accepted is None else rows.num_accepted
            assert accepted <= min(rows.num_true, count)
            done += tokens[:accepted]
        return logits[:], np.concatenate(expected)

    def worst_error(self, steps: Sequence[Step]) -> float:
        """Largest |logits - reference| of all steps; infinite where logits are not finite."""
        worst = 0.0
        for step in steps:
            logits, expected = self.step(step)
            assert logits.shape == expected.shape
            error = np.abs(logits - expected)
            worst = max(worst, float(error.max()) if np.isfinite(error).all() else np.inf)
        return worst
