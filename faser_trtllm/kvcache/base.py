"""The KV cache protocol: block allocation as seen by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Tokens of a sequence whose KV was found in the cache, for the target and for the draft model."""

    num_cached_tokens: int
    num_draft_cached_tokens: int


Int32Array = npt.NDArray[np.int32]


class BlockListener(Protocol):
    """Gets prefix cache insertions and evictions in order, on the scheduler's thread, except of salted sequences."""

    def stored(self, chain_id: int, parent_id: int, token_ids: bytes) -> None:
        """Handle a full block that became reusable.

        chain_id: a new number for the prefix that ends with the block. parent_id: the prefix before it, 0 at the start
        of a sequence. token_ids: the block's tokens, int32.
        """

    def removed(self, chain_id: int) -> None:
        """Handle the eviction of the last block of a prefix."""


class KVCache(Protocol):
    """Paged blocks per slot.

    block_table [max_batch_size, max_blocks_per_seq] int32 and bounds [max_batch_size, 3] int32 are written in place. A
    slot's bounds say when it needs a call: commit() once the target has computed bounds[0] tokens or the draft model
    bounds[1], and rewind() if the slot has at most bounds[2] tokens and drafts.
    """

    tokens_per_block: int
    block_table: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int32]
    num_reused_blocks: int  # counted by the scheduler, since a sequence may be closed again before it runs
    num_allocated_blocks: int

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""

    @property
    def num_cached_blocks(self) -> int: ...

    def num_blocks_for(self, num_tokens: int) -> int: ...

    def num_held_blocks(self, slot: int) -> int: ...

    def add_sequence(self, slot: int, tokens: npt.NDArray[np.int32], num_tokens: int, salt: str = "") -> CachedPrefix:
        """Open a slot for tokens[:num_tokens], reusing the part of its prefix that is cached under the same salt."""

    def allocate(self, slot: int, num_tokens: int) -> bool:
        """Grow the slot to hold num_tokens tokens; return False, with no change, if there is no room."""

    def allocate_many(self, slots: Int32Array, num_tokens: Int32Array) -> bool:
        """Call allocate() for each slot; return False at the first without room."""

    def rewind(self, slot: int, num_tokens: int) -> None:
        """Free the blocks beyond those that num_tokens tokens need."""

    def commit(
        self, slot: int, tokens: npt.NDArray[np.int32], num_computed_tokens: int, num_draft_computed_tokens: int
    ) -> None:
        """Offer the full blocks of tokens[:num_computed_tokens], which are final and have KV, for reuse.

        num_draft_computed_tokens: number of tokens covered by the draft model's KV, pending drafts included.
        """

    def forget_draft(self) -> None:
        """Mark all of the draft model's KV as invalid (see Scheduler.forget_draft_kv)."""

    def discard(self, slot: int) -> None:
        """End the reuse of the slot's blocks, since their KV may be wrong, and of those computed from them."""

    def free(self, slot: int) -> None:
        """Close the slot."""

    def watch(self, listener: BlockListener) -> bool:
        """Report insertions and evictions to the listener from now on; return False if that is not supported."""

    def check_integrity(self) -> None:
        """Raise AssertionError if a block leaked, was freed in use, or is shared wrongly."""


def kv_gauges(kv: KVCache) -> dict[str, float]:
    """Return a cache's state and counters, named as in Executor.stats()."""
    blocks = ("num_blocks", "num_free_blocks", "num_cached_blocks", "num_reused_blocks", "num_allocated_blocks")
    return {f"kv_{name}": getattr(kv, name) for name in ("tokens_per_block", *blocks)}
