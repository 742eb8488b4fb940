"""The Engine protocol: one model's compiled forward pass over ragged rows and block tables.

An engine handles token ids, positions and blocks; it knows nothing about request lifecycles or text.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from faser_trtllm import native
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.decision import DraftStop
from faser_trtllm.core.value import value
from faser_trtllm.ops.prune_rows import PruneBatch


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The sizes and limits of an engine, and of the memory it was opened with."""

    vocab_size: int
    max_seq_len: int
    num_layers: int
    num_blocks: int
    tokens_per_block: int
    max_num_tokens: int  # rows of one pass
    max_batch_size: int  # requests of one pass, and slots
    segments: tuple[int, ...]  # layer boundaries: (0, ..., num_layers)
    max_num_branches: int = 0  # per pass; branches have the blocks from num_blocks on, the slots from max_batch_size on
    max_logit_rows: int | None = None  # per pass; None: no limit
    is_head: bool = False  # a draft head: each of its rows reads the target's hidden row of the position before
    block_size: int = 0  # rows per block of a block drafter; 0: no block drafter
    num_experts: int = 0  # per layer; 0: a dense model
    top_k: int = 0  # experts per row and layer

    @property
    def draft_kind(self) -> int:
        """One of native's DRAFT_MODEL, DRAFT_HEAD and DRAFT_BLOCK; it decides which rows must run before drafting."""
        if self.block_size:
            return native.DRAFT_BLOCK
        return native.DRAFT_HEAD if self.is_head else native.DRAFT_MODEL

    @property
    def reads_target(self) -> bool:
        """True if this engine drafts from its target's hidden rows."""
        return self.draft_kind != native.DRAFT_MODEL

    @property
    def num_slots(self) -> int:
        """The number of slots of requests and branches, which is also the limit on entries of a pass."""
        return self.max_batch_size + self.max_num_branches

    @property
    def num_kv_blocks(self) -> int:
        """The number of KV blocks of requests and branches."""
        return self.num_blocks + self.max_num_branches


@value
class DraftBatch:
    """The arguments of one draft call; the three arrays of counts are contiguous int32 [num_requests]."""

    # Committed tokens and pending drafts that the draft model has not run yet, and always the last known token where
    # num_new_drafts > 0. A head gets committed tokens only, since it runs pending drafts itself.
    batch: RaggedBatch
    sampling: npt.NDArray[np.void]  # SamplingTable.array, indexed by batch.slots
    num_tokens: npt.NDArray[np.int32]  # committed tokens
    num_drafts: npt.NDArray[np.int32]  # pending drafts; 0 for a request that a block drafter drafts for
    num_new_drafts: npt.NDArray[np.int32]  # drafts wanted after the pending ones
    max_draft_len: int  # limit on num_drafts + num_new_drafts
    stop: DraftStop | None = None


class Engine(Protocol):
    """One model on one partition. Not thread-safe: one caller at a time."""

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def distinct_experts(self) -> float:
        """Experts per layer whose weights the last pass read, averaged over the layers that ran; 0.0 for a dense model.
        All segments of a pass count as one pass."""

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        """Run layers spec.segments[segment] to spec.segments[segment + 1].

        The last segment returns logits [num_logit_rows, >= vocab_size] fp32, valid until the next call.
        """

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        """Run all segments and return logits [num_logit_rows, >= vocab_size] fp32, valid until the next call."""

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        """Between two segments, keep only these hidden rows (ascending indices); the next batch must have exactly
        these rows."""

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Between two segments, return LM head scores fp32 [num_rows, num_candidates], a new array.

        rows int32 [num_rows]: indices of hidden rows, which stay as they are. candidates int32 [num_rows,
        num_candidates]: token ids per row; -1 scores -inf.
        """

    def prune(self, batch: PruneBatch) -> npt.NDArray[np.int32]:
        """Between two segments, score the drafts' candidates, apply the batch's rule and drop rows (ops/prune_rows.py).
        Return int32 [num_requests], the rows that each request keeps; the next batch must have these rows."""

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        """Draft autoregressively in one call; return the number of tokens drafted, int32 [num_requests].

        For draft engines only. Runs the batch's rows first. Request i then drafts num_new_drafts[i] tokens, or fewer if
        `stop` ends it (ops/draft_stop.py). They are written to its tokens, after its pending drafts.
        """

    def close(self) -> None: ...

    def __enter__(self) -> Engine: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
