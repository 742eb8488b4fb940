"""Engines that compute nothing and draw tokens at random, so that a step's time is the host's.

Drafted tokens are all 0, which the requests' memory holds already, so a draft call has nothing to write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.engine.base import DraftBatch, EngineSpec
from faser_trtllm.ops.prune_rows import PruneBatch

if TYPE_CHECKING:
    from typing_extensions import Self

DRAFTED, OTHER = 0, 1
VOCAB_SIZE = 2
NUM_COINS = 1 << 14


class RandomLogits:
    """Logits whose most probable token is DRAFTED in a share `acceptance` of the rows, and OTHER in the rest."""

    def __init__(self, max_rows: int, vocab_size: int, acceptance: float, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._logits = np.zeros((NUM_COINS + max_rows, vocab_size), np.float32)
        is_other = self._random.random(len(self._logits)) >= acceptance
        self._logits[np.arange(len(self._logits)), np.where(is_other, OTHER, DRAFTED)] = 1.0

    def of_pass(self, num_rows: int) -> npt.NDArray[np.float32]:
        """Return the next pass's logits [num_rows, vocab_size], 1 at the token and 0 elsewhere, by seed and pass."""
        first = int(self._random.integers(NUM_COINS))
        return self._logits[first : first + num_rows]


class NullEngine:
    """A target with RandomLogits, and a draft that always drafts DRAFTED, for greedy requests."""

    distinct_experts = 0.0  # it has no experts

    def __init__(self, spec: EngineSpec, acceptance: float = 0.7, seed: int = 0) -> None:
        self.spec = spec
        self._logits = RandomLogits(spec.max_num_tokens, spec.vocab_size, acceptance, seed)

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        return self._logits.of_pass(batch.logit_rows.size)

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        return self.forward(batch) if segment == len(self.spec.segments) - 2 else None

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        """Make all wanted drafts, without draft_batch.stop."""
        counts: npt.NDArray[np.int32] = draft_batch.num_new_drafts.copy()
        return counts

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        """Do nothing; no rows are kept."""

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return np.zeros(candidates.shape, np.float32)

    def prune(self, batch: PruneBatch) -> npt.NDArray[np.int32]:
        return batch.num_rows

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
