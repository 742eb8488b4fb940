"""The Engine protocol: a compiled forward pass over ragged rows and block tables (TensorRT's sense of the word).

An engine handles token ids, positions and blocks; it knows nothing about request lifecycles, drafts or text.
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
    """An engine's sizes and limits, and the memory it was opened with."""

    vocab_size: int
    max_seq_len: int
    num_layers: int
    num_blocks: int
    tokens_per_block: int
    max_num_tokens: int  # rows of one pass
    max_batch_size: int  # requests of one pass, and slots
    segments: tuple[int, ...]  # layer boundaries: (0, ..., num_layers)
    max_num_branches: int = (
        0  # of one pass: the blocks num_blocks + k are their own, and slots max_batch_size + k theirs
    )
    max_logit_rows: int | None = None  # of one pass; None: all
    is_head: bool = False  # drafts from its target's hidden rows, of the position before each of its own rows
    block_size: int = 0  # rows of a block drafter, which drafts from its target's hidden rows too; 0: it is none
    num_experts: int = 0  # of a layer; 0: all of a layer's weights meet every row
    top_k: int = 0  # experts that a row goes through in each layer

    @property
    def draft_kind(self) -> int:
        """Which rows it needs before it drafts; one of native's DRAFT_MODEL, DRAFT_HEAD and DRAFT_BLOCK."""
        if self.block_size:
            return native.DRAFT_BLOCK
        return native.DRAFT_HEAD if self.is_head else native.DRAFT_MODEL

    @property
    def reads_target(self) -> bool:
        """It drafts from its target's hidden rows."""
        return self.draft_kind != native.DRAFT_MODEL

    @property
    def num_slots(self) -> int:
        """Slots of requests and branches, which are also the most entries of a pass."""
        return self.max_batch_size + self.max_num_branches

    @property
    def num_kv_blocks(self) -> int:
        """KV blocks of requests and branches."""
        return self.num_blocks + self.max_num_branches


@value
class DraftBatch:
    """The arguments of one draft call.

    batch: the draft model's missing rows, of committed tokens and of pending drafts; at least the row of the last known
    token where num_new_drafts > 0. Of a head, of committed tokens only: it runs pending drafts itself. sampling:
    SamplingTable.array, indexed by batch.slots. num_tokens, num_drafts, num_new_drafts [num_requests] int32,
    contiguous: committed tokens, drafts pending after them, and drafts wanted after those. max_draft_len: the most
    that may be pending then. A block drafter's num_drafts is 0 where num_new_drafts is not.
    """

    batch: RaggedBatch
    sampling: npt.NDArray[np.void]
    num_tokens: npt.NDArray[np.int32]
    num_drafts: npt.NDArray[np.int32]
    num_new_drafts: npt.NDArray[np.int32]
    max_draft_len: int
    stop: DraftStop | None = None


class Engine(Protocol):
    """One model on one partition. Not thread-safe: one caller at a time."""

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def distinct_experts(self) -> float:
        """Experts whose weights the last pass read, of a layer: the mean over the layers that ran; 0.0: it has none.
        Segments count as one pass."""

    def run_segment(self, batch: RaggedBatch, segment: int) -> npt.NDArray[np.float32] | None:
        """Run layers spec.segments[segment] to spec.segments[segment + 1].

        The last segment returns logits [num_logit_rows, >= vocab_size] fp32, valid until the next call.
        """

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        """All segments in one call -> logits [num_logit_rows, >= vocab_size] fp32, valid until the next call."""

    def compact_rows(self, rows: npt.NDArray[np.int32]) -> None:
        """Keep only these hidden rows (ascending indices) between two segments; the next batch matches them."""

    def early_exit(self, rows: npt.NDArray[np.int32], candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Between two segments: LM head scores of some hidden rows' candidates -> scores [num_rows, num_candidates]
        fp32.

        rows [num_rows] int32: indices of hidden rows. candidates [num_rows, num_candidates] int32: each row's own token
        ids; -1 scores -inf. Hidden rows are unchanged. Returns a new array each time.
        """

    def prune(self, batch: PruneBatch) -> npt.NDArray[np.int32]:
        """Between two segments: score the drafts' candidates, decide by the batch's rule, and drop rows ->
        [num_requests] int32 rows that each request keeps (ops/prune_rows.py). The next batch matches them."""

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        """Draft autoregressively in one call (a draft model's engine only) -> [num_requests] tokens drafted.

        The batch's rows are run first; request i then drafts num_new_drafts[i] tokens, written after its known ones,
        or fewer if stop ends it (ops/draft_stop.py).
        """

    def close(self) -> None: ...

    def __enter__(self) -> Engine: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
