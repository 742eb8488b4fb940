"""Tests of cache events: a listener that replays them knows the very prefixes that the cache would find."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_trtllm.kvcache.manager import KVCacheManager
from tests.support.effort import examples

SIZE = 2


class Replay:
    """Keeps the blocks of a cache as a router on another machine would, from events alone."""

    def __init__(self):
        self.blocks = {}  # chain id -> (parent id, token ids)

    def stored(self, chain_id, parent_id, token_ids):
        assert chain_id not in self.blocks, "a number is used once"
        assert parent_id == 0 or parent_id in self.blocks, "no lookup finds a block whose parent was removed"
        self.blocks[chain_id] = (parent_id, tuple(np.frombuffer(token_ids, np.int32).tolist()))

    def removed(self, chain_id):
        del self.blocks[chain_id]
        assert all(parent_id != chain_id for parent_id, _ in self.blocks.values()), "the last block goes first"

    def num_cached_tokens(self, tokens):
        """Count cached tokens as add_sequence does: at least the last token is left."""
        parent, found = 0, 0
        for start in range(0, (len(tokens) - 1) // SIZE * SIZE, SIZE):
            wanted = (parent, tuple(tokens[start : start + SIZE]))
            match = [chain_id for chain_id, block in self.blocks.items() if block == wanted]
            if not match:
                break
            (parent,) = match
            found += SIZE
        return found


def test_a_prefix_stays_cached_while_a_twin_that_was_computed_at_the_same_time_runs():
    """Two equal prompts run in one pass; the first ends, and a third request needs all memory that is left."""
    cache, replay = KVCacheManager(10, SIZE, 3, 8), Replay()
    cache.watch(replay)
    tokens = np.arange(16, dtype=np.int32)
    for slot in (0, 1):
        cache.add_sequence(slot, tokens, 4)
        assert cache.allocate(slot, 5)
    for slot, num_computed in ((0, 4), (1, 6)):  # the second has more tokens when the first ends
        assert cache.allocate(slot, num_computed + 1)
        cache.commit(slot, tokens, num_computed, 0)
    cache.free(0)
    other = np.arange(100, 112, dtype=np.int32)
    cache.add_sequence(2, other, 12)
    assert cache.allocate(2, 12)
    cache.free(2)
    assert cache.allocate(1, 9)
    cache.commit(1, tokens, 8, 0)
    cache.free(1)
    cache.check_integrity()
    assert replay.num_cached_tokens(tokens.tolist()) == 8
    assert cache.add_sequence(0, tokens, 12).num_cached_tokens == 8


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.sampled_from(["", "", "salt"])),
    min_size=1,
    max_size=30,
)


@settings(max_examples=examples(150))
@given(prompts, st.integers(5, 12))
def test_events_replayed_are_the_cache(prompts, num_blocks):
    cache, replay = KVCacheManager(num_blocks, SIZE, 1, 8), Replay()
    cache.watch(replay)
    num_salted = 0
    for prompt, salt in prompts:
        tokens = np.array(prompt, np.int32)
        found = cache.add_sequence(0, tokens, len(prompt), salt).num_cached_tokens
        assert salt or found == replay.num_cached_tokens(prompt)
        assert cache.allocate(0, len(prompt))
        cache.commit(0, tokens, len(prompt), 0)
        cache.free(0)
        num_salted += bool(salt)
        assert num_salted or len(replay.blocks) == cache.num_cached_blocks
        cache.check_integrity()


@settings(max_examples=examples(150))
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 1), st.integers(0, 8)), min_size=30, max_size=60
    ),
    st.integers(6, 12),
)
def test_sequences_that_run_at_the_same_time_leave_no_block_that_no_lookup_finds(steps, num_blocks):
    """Three slots over two token values, so that equal prefixes are often computed twice; check_integrity() looks."""
    cache, replay, running = KVCacheManager(num_blocks, SIZE, 3, num_blocks), Replay(), {}
    cache.watch(replay)
    for slot, ends, token, num_new in steps:
        new = [token] * num_new
        if slot not in running:
            tokens = np.array([0, *new], np.int32)
            running[slot] = tokens, cache.add_sequence(slot, tokens, tokens.size).num_cached_tokens
        elif ends:
            cache.free(slot)
            del running[slot]
        else:
            tokens = np.append(running[slot][0], new).astype(np.int32)
            if cache.allocate(slot, tokens.size):
                cache.commit(slot, tokens, tokens.size, 0)
                running[slot] = tokens, tokens.size
                cached = replay.num_cached_tokens([*tokens.tolist(), 0])
                assert cached == tokens.size // SIZE * SIZE, "what a sequence holds is cached"
        cache.check_integrity()
        assert len(replay.blocks) == cache.num_cached_blocks
