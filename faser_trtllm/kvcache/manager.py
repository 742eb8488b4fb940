"""The KV cache manager, which alone gives blocks to requests.

Target and draft engines have separate KV memory but share block ids, so there is one block table. A cached block
records whether the draft's KV in it is valid, because a request with speculation off never computes it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from faser_trtllm.kvcache.base import BlockListener, CachedPrefix, Int32Array
from faser_trtllm.kvcache.block_pool import ROOT, BlockPool

_NOTHING_DUE = (np.iinfo(np.int32).max, np.iinfo(np.int32).max, -1)  # KVCache.bounds


class _Sequence:
    """The blocks of one slot. Of the first num_registered, each is cached under its prefix, or a duplicate of it is."""

    __slots__ = ("blocks", "chain_id", "is_private", "num_draft_registered", "num_registered")

    def __init__(self, is_private: bool) -> None:
        self.blocks: list[int] = []
        self.is_private = is_private  # no further block becomes reusable
        self.num_registered = 0
        self.num_draft_registered = 0
        self.chain_id: int | str = ROOT


class KVCacheManager:
    """Paged blocks per slot, with prefix reuse.

    block_table [max_batch_size + num_branch_rows, max_blocks_per_seq] int32 has a row per slot, written in place and
    read by engines. Its last rows belong to executor/branches.py. Methods return False if blocks run out; a wrong slot,
    or a rewind into registered blocks, is an AssertionError.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        max_batch_size: int,
        max_blocks_per_seq: int,
        *,
        enable_block_reuse: bool = True,
        num_branch_rows: int = 0,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        shape = max_batch_size + num_branch_rows, max_blocks_per_seq
        self.block_table: npt.NDArray[np.int32] = np.zeros(shape, np.int32)
        self.num_reused_blocks = 0
        self.num_allocated_blocks = 0
        self._pool = BlockPool(num_blocks)
        self._enable_block_reuse = enable_block_reuse
        self._sequences: list[_Sequence | None] = [None] * max_batch_size
        self._capacity = np.zeros(max_batch_size, np.int32)  # tokens that the slot's blocks hold
        self.bounds: Int32Array = np.zeros((max_batch_size, 3), np.int32)
        self.bounds[:] = _NOTHING_DUE
        self._capacity_view, self._bounds_view = self._capacity.data, self.bounds.data  # faster for single slots

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
        """Report to the listener from now on which blocks become reusable and which no longer are."""
        self._pool.listener = listener
        return True

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def num_held_blocks(self, slot: int) -> int:
        return len(self._sequence(slot).blocks)

    def add_sequence(self, slot: int, tokens: npt.NDArray[np.int32], num_tokens: int, salt: str = "") -> CachedPrefix:
        """Open a slot for tokens[:num_tokens], reusing the cached blocks of its prefix under the same salt.

        At least the last token is left to compute, since the next step needs its logits.
        """
        assert self._sequences[slot] is None, f"slot {slot} is taken"
        sequence = self._sequences[slot] = _Sequence(not self._enable_block_reuse)
        self._note_blocks(slot, sequence)
        if sequence.is_private:
            return CachedPrefix(0, 0)
        pool, size = self._pool, self.tokens_per_block
        sequence.chain_id = salt or ROOT
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
        self._note_blocks(slot, sequence)
        return CachedPrefix(sequence.num_registered * size, sequence.num_draft_registered * size)

    def allocate(self, slot: int, num_tokens: int) -> bool:
        """Grow the slot to hold num_tokens tokens; return False, with no change, if there is no room."""
        sequence = self._sequence(slot)
        if num_tokens <= self._capacity_view[slot]:
            return True
        missing = -(-num_tokens // self.tokens_per_block) - len(sequence.blocks)
        if missing > self._pool.num_free:
            return False
        for _ in range(missing):
            self._append(slot, sequence, self._pool.allocate())
        self._note_blocks(slot, sequence)
        self.num_allocated_blocks += missing
        return True

    def allocate_many(self, slots: Int32Array, num_tokens: Int32Array) -> bool:
        """See KVCache.allocate_many."""
        lacking = (num_tokens > self._capacity.take(slots)).nonzero()[0]
        if not lacking.size:
            return True
        return all(map(self.allocate, slots[lacking].tolist(), num_tokens[lacking].tolist()))

    def rewind(self, slot: int, num_tokens: int) -> None:
        """Free the blocks beyond those that num_tokens tokens need."""
        sequence = self._sequence(slot)
        if num_tokens > self._capacity_view[slot] - self.tokens_per_block:
            return
        keep = -(-num_tokens // self.tokens_per_block)
        assert keep >= sequence.num_registered, f"rewind of slot {slot} to {num_tokens} tokens drops computed blocks"
        for block in reversed(sequence.blocks[keep:]):
            self._pool.release(block)
        del sequence.blocks[keep:]
        self._note_blocks(slot, sequence)

    def commit(
        self,
        slot: int,
        tokens: npt.NDArray[np.int32],
        num_computed_tokens: int,
        num_draft_computed_tokens: int,
    ) -> None:
        """Offer the full blocks of tokens[:num_computed_tokens], which are final, for reuse; see KVCache.commit."""
        sequence = self._sequence(slot)
        if sequence.is_private:
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
        self._note_blocks(slot, sequence)

    def forget_draft(self) -> None:
        """See KVCache.forget_draft."""
        self._pool.forget_draft()
        for slot, sequence in enumerate(self._sequences):
            if sequence is not None:
                sequence.num_draft_registered = 0
                self._note_blocks(slot, sequence)

    def discard(self, slot: int) -> None:
        """See KVCache.discard. Sequences that share such blocks go on, but theirs no longer become reusable."""
        sequence = self._sequence(slot)
        gone = self._pool.discard(sequence.blocks[: sequence.num_registered])
        for other_slot, other in enumerate(self._sequences):
            if other is not None and (other is sequence or not gone.isdisjoint(other.blocks)):
                other.is_private = True
                self._note_blocks(other_slot, other)

    def free(self, slot: int) -> None:
        """Close the slot; its last blocks will be evicted first."""
        for block in reversed(self._sequence(slot).blocks):
            self._pool.release(block)
        self._sequences[slot] = None
        self._capacity[slot] = 0
        self.bounds[slot] = _NOTHING_DUE

    def check_integrity(self) -> None:
        """Check in full, for tests and idle times, that no block leaked, was freed in use or is shared wrongly."""
        held = []
        owners: dict[int, int] = {}
        for slot, sequence in enumerate(self._sequences):
            if sequence is None:
                continue
            assert self.block_table[slot, : len(sequence.blocks)].tolist() == sequence.blocks
            assert self._capacity[slot] == len(sequence.blocks) * self.tokens_per_block
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

    def _note_blocks(self, slot: int, sequence: _Sequence) -> None:
        size, num_blocks = self.tokens_per_block, len(sequence.blocks)
        self._capacity_view[slot] = num_blocks * size
        full, draft_full = (sequence.num_registered + 1) * size, (sequence.num_draft_registered + 1) * size
        if sequence.is_private:
            full = draft_full = _NOTHING_DUE[0]
        bounds = self._bounds_view
        bounds[slot, 0], bounds[slot, 1], bounds[slot, 2] = full, draft_full, (num_blocks - 1) * size
