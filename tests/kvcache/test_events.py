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
        self.blocks[chain_id] = (parent_id, tuple(np.frombuffer(token_ids, np.int32).tolist()))

    def removed(self, chain_id):
        del self.blocks[chain_id]

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
