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
    """Receives prefix cache insertions and evictions in order, on the scheduler's thread; none of salted sequences."""

    def stored(self, chain_id: int, parent_id: int, token_ids: bytes) -> None:
        """A full block became reusable. chain_id: the prefix that ends with it, a new number; parent_id: the prefix
        before it, 0 at the start of a sequence; token_ids: the block's own, int32."""

    def removed(self, chain_id: int) -> None:
        """The last block of this prefix was evicted."""


class KVCache(Protocol):
    """Paged blocks per slot; block_table [max_batch_size, max_blocks_per_seq] int32 is written in place.

    bounds [max_batch_size, 3] int32, written in place: where commit() and rewind() have something to do in a slot: a
    commit of so many computed tokens or so many of the draft model, or more, and a rewind to so many tokens or less.
    """

    tokens_per_block: int
    block_table: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int32]
    num_reused_blocks: int
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
        """Grow the slot to hold num_tokens tokens; False, with no change, if there is no room."""

    def allocate_many(self, slots: Int32Array, num_tokens: Int32Array) -> bool:
        """allocate() for each; False at the first for which there is no room."""

    def rewind(self, slot: int, num_tokens: int) -> None:
        """Free the blocks beyond those that num_tokens tokens need."""

    def commit(
        self, slot: int, tokens: npt.NDArray[np.int32], num_computed_tokens: int, num_draft_computed_tokens: int
    ) -> None:
        """tokens[:num_computed_tokens] are final and have KV: offer their full blocks for reuse.

        num_draft_computed_tokens: number of tokens covered by the draft model's KV, including pending ones.
        """

    def forget_draft(self) -> None:
        """None of the draft model's KV is valid any longer: another model takes its place."""

    def free(self, slot: int) -> None:
        """Close the slot."""

    def watch(self, listener: BlockListener) -> bool:
        """Report insertions and evictions to the listener from now on; False if this cache does not support it."""

    def check_integrity(self) -> None:
        """Raise AssertionError if a block leaked, was freed in use, or is shared wrongly."""


def kv_gauges(kv: KVCache) -> dict[str, float]:
    """State and counts of a cache, by the names of Executor.stats()."""
    blocks = ("num_blocks", "num_free_blocks", "num_cached_blocks", "num_reused_blocks", "num_allocated_blocks")
    return {f"kv_{name}": getattr(kv, name) for name in ("tokens_per_block", *blocks)}
