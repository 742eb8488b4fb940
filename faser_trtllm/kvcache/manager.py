"""The KV cache manager: the only writer of block ids.

Target and draft engines have separate KV memory but share block ids, so there is one block table. A cached block
remembers whether the draft's KV in it is valid: a request with speculation off never computes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from faser_trtllm.kvcache.base import BlockListener, CachedPrefix
from faser_trtllm.kvcache.block_pool import ROOT, BlockPool


class _Sequence:
    """The blocks of one slot; the first num_registered are known to the pool under their prefix (or as duplicates).

    So that a step's calls see at once that they have nothing to do: capacity, the tokens that the blocks hold;
    next_end and next_draft_end, the tokens that the target and the draft model must have computed for a commit.
    """

    __slots__ = (
        "blocks",
        "capacity",
        "chain_id",
        "next_draft_end",
        "next_end",
        "num_draft_registered",
        "num_registered",
    )

    def __init__(self, tokens_per_block: int) -> None:
        self.blocks: list[int] = []
        self.capacity = 0
        self.num_registered = 0
        self.num_draft_registered = 0
        self.chain_id = ROOT
        self.next_end = self.next_draft_end = tokens_per_block

    def note_registered(self, tokens_per_block: int) -> None:
        self.next_end = (self.num_registered + 1) * tokens_per_block
        self.next_draft_end = (self.num_draft_registered + 1) * tokens_per_block


class KVCacheManager:
    """Paged blocks per slot, with prefix reuse.

    block_table [max_batch_size, max_blocks_per_seq] int32: row per slot, written in place; engines read it.
    Shortage is a return value (False); a wrong slot or a rewind into registered blocks is an AssertionError.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        max_batch_size: int,
        max_blocks_per_seq: int,
        *,
        enable_block_reuse: bool = True,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.block_table: npt.NDArray[np.int32] = np.zeros((max_batch_size, max_blocks_per_seq), np.int32)
        self.num_reused_blocks = 0
        self.num_allocated_blocks = 0
        self._pool = BlockPool(num_blocks)
        self._enable_block_reuse = enable_block_reuse
        self._sequences: list[_Sequence | None] = [None] * max_batch_size

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now; includes unused cached blocks, which would be evicted."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        return self._pool.num_cached

    def watch(self, listener: BlockListener) -> bool:
        """Tell the listener of every block that can be reused from now on, and when it no longer can."""
        self._pool.listener = listener
        return True

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def num_held_blocks(self, slot: int) -> int:
        return len(self._sequence(slot).blocks)

    def add_sequence(self, slot: int, tokens: npt.NDArray[np.int32], num_tokens: int) -> CachedPrefix:
        """Open a slot for tokens[:num_tokens], reusing the cached blocks of its prefix.

        At least the last token is left to compute, since the next step needs its logits.
        """
        assert self._sequences[slot] is None, f"slot {slot} is taken"
        sequence = self._sequences[slot] = _Sequence(self.tokens_per_block)
        if not self._enable_block_reuse:
            return CachedPrefix(0, 0)
        pool, size = self._pool, self.tokens_per_block
        draft_valid = True
        for start in range(0, (num_tokens - 1) // size * size, size):
            block = pool.lookup((sequence.chain_id, tokens[start : start + size].tobytes()))
            if block is None:
                break
            pool.acquire(block)
            self._append(slot, sequence, block)
            sequence.chain_id = pool.chain_id(block)
            sequence.num_registered += 1
            draft_valid = draft_valid and pool.is_draft_valid(block)
            sequence.num_draft_registered += draft_valid
        sequence.note_registered(size)
        self.num_reused_blocks += sequence.num_registered
        return CachedPrefix(sequence.num_registered * size, sequence.num_draft_registered * size)

    def allocate(self, slot: int, num_tokens: int) -> bool:
        """Grow the slot to hold num_tokens tokens; False, with no change, if there is no room."""
        sequence = self._sequence(slot)
        if num_tokens <= sequence.capacity:
            return True
        missing = -(-num_tokens // self.tokens_per_block) - len(sequence.blocks)
        if missing > self._pool.num_free:
            return False
        for _ in range(missing):
            self._append(slot, sequence, self._pool.allocate())
        self.num_allocated_blocks += missing
        return True

    def allocate_many(self, slots: Sequence[int], num_tokens: Sequence[int]) -> bool:
        """As KVCache.allocate_many: a comparison for each slot whose last block has room."""
        sequences = self._sequences
        for slot, count in zip(slots, num_tokens, strict=True):
            sequence = sequences[slot]
            assert sequence is not None, f"slot {slot} holds no sequence"
            if count > sequence.capacity and not self.allocate(slot, count):
                return False
        return True

    def rewind(self, slot: int, num_tokens: int) -> None:
        """Free the blocks beyond those that num_tokens tokens need."""
        sequence = self._sequence(slot)
        if num_tokens > sequence.capacity - self.tokens_per_block:
            return
        keep = -(-num_tokens // self.tokens_per_block)
        assert keep >= sequence.num_registered, f"rewind of slot {slot} to {num_tokens} tokens drops computed blocks"
        for block in reversed(sequence.blocks[keep:]):
            self._pool.release(block)
        del sequence.blocks[keep:]
        sequence.capacity = keep * self.tokens_per_block

    def rewind_many(self, slots: Sequence[int], num_tokens: Sequence[int]) -> None:
        """As KVCache.rewind_many: a comparison for each slot that keeps its blocks."""
        sequences, size = self._sequences, self.tokens_per_block
        for slot, count in zip(slots, num_tokens, strict=True):
            sequence = sequences[slot]
            assert sequence is not None, f"slot {slot} holds no sequence"
            if count <= sequence.capacity - size:
                self.rewind(slot, count)

    def commit(
        self,
        slot: int,
        tokens: npt.NDArray[np.int32],
        num_computed_tokens: int,
        num_draft_computed_tokens: int,
    ) -> None:
        """Offer the full blocks of tokens[:num_computed_tokens] for reuse; those tokens are final.

        num_draft_computed_tokens: as KVCache.commit has it. Costs next to nothing between two block ends.
        """
        if not self._enable_block_reuse:
            return
        sequence = self._sequence(slot)
        if num_computed_tokens < sequence.next_end and num_draft_computed_tokens < sequence.next_draft_end:
            return
        size = self.tokens_per_block
        while (sequence.num_registered + 1) * size <= num_computed_tokens:
            start = sequence.num_registered * size
            block = sequence.blocks[sequence.num_registered]
            key = (sequence.chain_id, tokens[start : start + size].tobytes())
            sequence.chain_id = self._pool.register(block, key)
            sequence.num_registered += 1
        last = min(sequence.num_registered, num_draft_computed_tokens // size)
        for index in range(sequence.num_draft_registered, last):
            self._pool.mark_draft_valid(sequence.blocks[index])
        sequence.num_draft_registered = max(sequence.num_draft_registered, last)
        sequence.note_registered(size)

    def commit_many(
        self,
        slots: Sequence[int],
        tokens: Sequence[npt.NDArray[np.int32]],
        num_computed_tokens: Sequence[int],
        num_draft_computed_tokens: Sequence[int],
    ) -> None:
        """As KVCache.commit_many: two comparisons for each slot between two block ends."""
        if not self._enable_block_reuse:
            return
        sequences = self._sequences
        columns = zip(slots, num_computed_tokens, num_draft_computed_tokens, strict=True)
        for index, (slot, computed, draft_computed) in enumerate(columns):
            sequence = sequences[slot]
            assert sequence is not None, f"slot {slot} holds no sequence"
            if computed >= sequence.next_end or draft_computed >= sequence.next_draft_end:
                self.commit(slot, tokens[index], computed, draft_computed)

    def free(self, slot: int) -> None:
        """Close the slot; its last blocks will be evicted first."""
        for block in reversed(self._sequence(slot).blocks):
            self._pool.release(block)
        self._sequences[slot] = None

    def check_integrity(self) -> None:
        """A full audit, for tests and idle times: no block leaked, freed in use or shared wrongly."""
        held = []
        owners: dict[int, int] = {}
        for slot, sequence in enumerate(self._sequences):
            if sequence is None:
                continue
            assert self.block_table[slot, : len(sequence.blocks)].tolist() == sequence.blocks
            assert sequence.capacity == len(sequence.blocks) * self.tokens_per_block
            held += sequence.blocks
            for block in sequence.blocks[sequence.num_registered :]:
                assert block not in owners, f"block {block} is written by slots {owners[block]} and {slot}"
                owners[block] = slot
        assert all(held.count(block) == 1 for block in owners), "a block in writing is shared"
        self._pool.check_integrity(held)

    def _sequence(self, slot: int) -> _Sequence:
        sequence = self._sequences[slot]
        assert sequence is not None, f"slot {slot} holds no sequence"
        return sequence

    def _append(self, slot: int, sequence: _Sequence, block: int) -> None:
        self.block_table[slot, len(sequence.blocks)] = block
        sequence.blocks.append(block)
        sequence.capacity += self.tokens_per_block
