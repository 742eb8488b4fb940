"""allocate_many, and commits and rewinds where the bounds ask for them only, do what a call per slot does."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.kvcache.manager import KVCacheManager

NUM_SLOTS, SIZE, MAX_BLOCKS = 3, 4, 6
MAX_TOKENS = SIZE * MAX_BLOCKS

steps = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    min_size=1,
    max_size=6,
)
"""Per step and slot: tokens committed, and drafts behind them that are rejected."""


def open_cache(num_blocks, tokens, reuse):
    kv = KVCacheManager(num_blocks, SIZE, NUM_SLOTS, MAX_BLOCKS, enable_block_reuse=reuse)
    for slot in range(NUM_SLOTS):
        kv.add_sequence(slot, tokens[slot], 1)
    return kv


def state(kv):
    kv.check_integrity()
    held = [kv.num_held_blocks(slot) for slot in range(NUM_SLOTS)]
    tables = [kv.block_table[slot, :count].tolist() for slot, count in enumerate(held)]
    return tables, kv.num_free_blocks, kv.num_cached_blocks, kv.num_allocated_blocks


def arrays(*columns):
    return [np.array(column, np.int32) for column in columns]


@given(steps=steps, num_blocks=st.integers(4, NUM_SLOTS * MAX_BLOCKS), reuse=st.booleans(), lag=st.integers(0, 5))
def test_many_at_once_are_one_after_the_other(steps, num_blocks, reuse, lag):
    tokens = np.arange(NUM_SLOTS * MAX_TOKENS, dtype=np.int32).reshape(NUM_SLOTS, MAX_TOKENS) // SIZE % 2
    single, many = open_cache(num_blocks, tokens, reuse), open_cache(num_blocks, tokens, reuse)
    slots, known = list(range(NUM_SLOTS)), [0] * NUM_SLOTS
    for step in steps:
        known = [count + new for count, (new, _) in zip(known, step, strict=True)]
        wanted = [count + drafts for count, (_, drafts) in zip(known, step, strict=True)]
        if max(wanted) > MAX_TOKENS:
            break
        fits = all(single.allocate(slot, count) for slot, count in zip(slots, wanted, strict=True))
        assert many.allocate_many(*arrays(slots, wanted)) == fits
        assert state(many) == state(single)
        if not fits:
            break
        draft_known = [max(0, count - lag) for count in known]
        for slot, count, draft_count in zip(slots, known, draft_known, strict=True):
            single.commit(slot, tokens[slot], count, draft_count)
        for slot, count, draft_count in zip(slots, known, draft_known, strict=True):
            full, draft_full, _ = many.bounds[slot].tolist()
            if count >= full or draft_count >= draft_full:
                many.commit(slot, tokens[slot], count, draft_count)
        assert state(many) == state(single)
        for slot, count in zip(slots, known, strict=True):
            single.rewind(slot, count)
            if count <= many.bounds[slot, 2]:
                many.rewind(slot, count)
        assert state(many) == state(single)
    for slot in slots:
        single.free(slot)
        many.free(slot)
    prefix = [kv.add_sequence(0, tokens[0], MAX_TOKENS) for kv in (single, many)]
    assert prefix[0] == prefix[1]
