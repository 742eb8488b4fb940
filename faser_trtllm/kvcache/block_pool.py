"""Blocks of the paged KV cache: reference counts, the free list, and the blocks kept for reuse.

A block is in one of three states: in use (referenced by sequences, cached or not), cached and unreferenced (evictable,
least recently used first), or free. The pool knows nothing about sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from faser_trtllm.kvcache.base import BlockListener

ROOT = 0
"""Chain id before the first block of a sequence."""

Key = tuple[int | str, bytes]
"""A block's token ids as bytes, after the chain id of the block before it. The first block of a salted sequence has the
salt in place of the chain id. Equal keys mean equal prefixes under the same salt."""


class BlockPool:
    """A fixed number of blocks, with ids 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.listener: BlockListener | None = None
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[Key, int] = {}  # cached blocks
        self._twins: dict[Key, list[int]] = {}  # blocks in use that equal a cached block and can take its place
        self._keys: list[Key | None] = [None] * num_blocks  # of cached blocks and twins
        self._chain_ids = [ROOT] * num_blocks
        self._next_chain_id = ROOT + 1
        self._draft_valid = [False] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can return, evicting if necessary."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._by_key)

    def allocate(self) -> int:
        """Allocate a block with one reference; the caller ensures num_free > 0."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
        self._ref_counts[block] = 1
        self._draft_valid[block] = False
        return block

    def acquire(self, block: int) -> None:
        """Add a reference to a cached block."""
        if self._ref_counts[block] == 0:
            del self._evictable[block]
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; an unreferenced block becomes evictable if it is cached, else free.

        The caller releases a prefix from its end, so that no block is evicted before those that follow it.
        """
        count = self._ref_counts[block] - 1
        assert count >= 0, f"block {block} was released more often than acquired"
        self._ref_counts[block] = count
        if count == 0:
            key = self._keys[block]
            if key is None:
                self._free.append(block)
            elif self._by_key[key] == block:
                self._evictable[block] = None
            else:
                self._free_twin(block, key)

    def lookup(self, key: Key) -> int | None:
        """Return the cached block of this prefix, or None."""
        return self._by_key.get(key)

    def register(self, block: int, key: Key) -> int:
        """Make a full block reusable and return the chain id of the prefix that ends with it, negative under a salt.

        If another block already caches the prefix, this one is its twin: private, with the same chain id, and cached
        from when the other is evicted. The prefix thus stays in the cache as long as a sequence holds it.
        """
        assert self._keys[block] is None, f"block {block} is cached under another prefix"
        known = self._by_key.get(key)
        if known is not None:
            self._keys[block], self._chain_ids[block] = self._keys[known], self._chain_ids[known]
            self._twins.setdefault(key, []).append(block)
            return self._chain_ids[block]
        self._by_key[key] = block
        self._keys[block] = key
        previous, token_ids = key
        is_salted = isinstance(previous, str) or previous < ROOT
        self._chain_ids[block] = -self._next_chain_id if is_salted else self._next_chain_id
        self._next_chain_id += 1
        if self.listener is not None and not isinstance(previous, str) and not is_salted:
            self.listener.stored(self._chain_ids[block], previous, token_ids)
        return self._chain_ids[block]

    def discard(self, blocks: Iterable[int]) -> set[int]:
        """End the caching of the prefixes that end with these blocks, and of all longer ones; return their blocks."""
        longer: dict[int | str, list[Key]] = {}
        for known in self._by_key:
            longer.setdefault(known[0], []).append(known)
        due = [key for block in blocks if (key := self._keys[block]) is not None]
        gone: set[int] = set()
        while due:
            key = due.pop()
            cached = self._by_key.pop(key, None)
            if cached is None:
                continue
            equal = {cached, *self._twins.pop(key, ())}
            for block in equal:
                self._keys[block] = None
            gone |= equal
            if cached in self._evictable:
                del self._evictable[cached]
                self._free.append(cached)
            self._note_removed(cached)
            due += longer.get(self._chain_ids[cached], ())
        return gone

    def chain_id(self, block: int) -> int:
        return self._chain_ids[block]

    def is_draft_valid(self, block: int) -> bool:
        return self._draft_valid[block]

    def mark_draft_valid(self, block: int) -> None:
        """Mark the draft model's KV of the block as computed too."""
        self._draft_valid[block] = True

    def forget_draft(self) -> None:
        """Mark the draft model's KV of every block as not computed."""
        self._draft_valid = [False] * self.num_blocks

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError on any mismatch. held: every reference that sequences have, with repetition."""
        counts = [0] * self.num_blocks
        for block in held:
            counts[block] += 1
        assert counts == self._ref_counts, "reference counts do not match what sequences hold"
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert not free & evictable, "a block is both free and cached"
        for block in range(self.num_blocks):
            unreferenced = counts[block] == 0
            key = self._keys[block]
            cached = key is not None and self._by_key[key] == block
            assert (block in free) == (unreferenced and not cached), f"block {block} leaked or was freed in use"
            assert (block in evictable) == (unreferenced and cached), f"cached block {block} leaked"
        equal: dict[Key, set[int]] = {}
        for block, key in enumerate(self._keys):
            if key is not None:
                equal.setdefault(key, set()).add(block)
        assert equal == {key: {block, *self._twins.get(key, ())} for key, block in self._by_key.items()}
        assert all(counts[twin] for twins in self._twins.values() for twin in twins), "a twin is not in use"
        chain_ids = {ROOT, *(self._chain_ids[block] for block in self._by_key.values())}
        assert all(isinstance(key[0], str) or key[0] in chain_ids for key in self._by_key), "no lookup finds a block"

    def _forget(self, block: int) -> None:
        """End the caching of a block; a twin takes its place."""
        key = self._keys[block]
        assert key is not None
        self._keys[block] = None
        twins = self._twins.get(key)
        if twins is not None:
            self._by_key[key] = twins[0]
            self._drop_twin(twins[0], key)
            return
        del self._by_key[key]
        self._note_removed(block)

    def _note_removed(self, block: int) -> None:
        if self.listener is not None and self._chain_ids[block] > ROOT:
            self.listener.removed(self._chain_ids[block])

    def _free_twin(self, block: int, key: Key) -> None:
        self._drop_twin(block, key)
        self._keys[block] = None
        self._free.append(block)
        cached = self._by_key[key]
        if cached in self._evictable:  # it stays longer than the blocks after it, which were released before
            self._evictable.move_to_end(cached)

    def _drop_twin(self, block: int, key: Key) -> None:
        twins = self._twins[key]
        twins.remove(block)
        if not twins:
            del self._twins[key]
