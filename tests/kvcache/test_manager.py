"""The cache against a plain model: which prefixes are where, and that no block is lost or shared wrongly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.kvcache.block_pool import BlockPool
from faser_trtllm.kvcache.manager import CachedPrefix, KVCacheManager
from tests.support.effort import examples, pick


def tokens_of(*ids):
    return np.array(ids, np.int32)


def make(num_blocks=8, tokens_per_block=4, reuse=True):
    return KVCacheManager(num_blocks, tokens_per_block, 4, 8, enable_block_reuse=reuse)


def fill(kv, slot, tokens, num_computed, num_draft_computed):
    """A new request's tokens, of which so many have KV."""
    kv.add_sequence(slot, tokens, tokens.size)
    assert kv.allocate(slot, tokens.size)
    kv.commit(slot, tokens, num_computed, num_draft_computed)


def test_blocks_are_allocated_all_or_none():
    kv = make(num_blocks=3)
    kv.add_sequence(0, tokens_of(1), 1)
    assert kv.allocate(0, 8)
    assert kv.num_held_blocks(0) == 2
    kv.add_sequence(1, tokens_of(1), 1)
    assert not kv.allocate(1, 8)
    assert kv.num_held_blocks(1) == 0
    assert kv.num_free_blocks == 1
    assert kv.allocate(1, 4)


def test_rewind_gives_back_what_the_tokens_do_not_need():
    kv = make()
    kv.add_sequence(0, tokens_of(1, 2), 2)
    assert kv.allocate(0, 17)
    kv.rewind(0, 9)
    assert kv.num_held_blocks(0) == 3
    kv.rewind(0, 9)
    assert kv.num_held_blocks(0) == 3
    assert kv.num_free_blocks == 5


@pytest.mark.parametrize("num_tokens", range(17))
def test_no_more_and_no_less_is_held_than_the_tokens_need(num_tokens):
    kv = make()
    kv.add_sequence(0, tokens_of(1, 2), 2)
    assert kv.allocate(0, num_tokens)
    assert kv.num_held_blocks(0) == -(-num_tokens // 4)
    assert kv.allocate(0, 12)
    kv.rewind(0, num_tokens)
    assert kv.num_held_blocks(0) == -(-num_tokens // 4)
    kv.check_integrity()


def test_a_finished_prefix_is_reused_except_for_the_last_token():
    kv = make()
    prompt = tokens_of(*range(8))
    assert kv.add_sequence(0, prompt, 8) == CachedPrefix(0, 0)
    kv.allocate(0, 8)
    kv.commit(0, prompt, 8, 8)
    blocks = kv.block_table[0, :2].copy()
    kv.free(0)
    assert kv.add_sequence(1, prompt, 8) == CachedPrefix(4, 4), "the last token must be computed again for its logits"
    assert kv.block_table[1, 0] == blocks[0]
    longer = tokens_of(*range(8), 99)
    assert kv.add_sequence(2, longer, 9) == CachedPrefix(8, 8)
    assert kv.block_table[2, :2].tolist() == blocks.tolist()
    kv.check_integrity()


def test_an_equal_block_after_another_prefix_is_not_reused():
    kv = make()
    first = tokens_of(1, 1, 1, 1, 7, 7, 7, 7)
    fill(kv, 0, first, 8, 8)
    other = tokens_of(2, 2, 2, 2, 7, 7, 7, 7, 0)
    assert kv.add_sequence(1, other, 9) == CachedPrefix(0, 0)


def test_only_computed_blocks_are_offered():
    kv = make()
    prompt = tokens_of(*range(12))
    fill(kv, 0, prompt, 7, 0)
    assert kv.add_sequence(1, prompt, 12) == CachedPrefix(4, 0)


def test_the_drafts_kv_is_known_to_be_missing_until_it_is_computed():
    kv = make()
    prompt = tokens_of(*range(9))
    fill(kv, 0, prompt, 8, 0)
    kv.free(0)
    assert kv.add_sequence(1, prompt, 9) == CachedPrefix(8, 0)
    kv.commit(1, prompt, 8, 5)
    assert kv.add_sequence(2, prompt, 9) == CachedPrefix(8, 4)
    kv.commit(1, prompt, 8, 8)
    assert kv.add_sequence(3, prompt, 9) == CachedPrefix(8, 8)


def test_a_reused_block_forgets_that_its_draft_kv_was_valid():
    kv = make(num_blocks=1)
    fill(kv, 0, tokens_of(1, 2, 3, 4), 4, 4)
    kv.free(0)
    fill(kv, 0, tokens_of(5, 6, 7, 8), 4, 0)
    kv.free(0)
    assert kv.add_sequence(0, tokens_of(5, 6, 7, 8, 9), 5) == CachedPrefix(4, 0)


def test_least_recently_used_leaves_are_evicted_first():
    kv = make(num_blocks=4)
    old, new = tokens_of(1, 1, 1, 1, 2, 2, 2, 2), tokens_of(3, 3, 3, 3, 4, 4, 4, 4)
    for prompt in (old, new):
        fill(kv, 0, prompt, 8, 8)
        kv.free(0)
    kv.add_sequence(0, tokens_of(9), 1)
    assert kv.allocate(0, 4)
    assert kv.add_sequence(1, np.append(old, 0).astype(np.int32), 9) == CachedPrefix(4, 4)
    assert kv.add_sequence(2, np.append(new, 0).astype(np.int32), 9) == CachedPrefix(8, 8)


def test_without_reuse_nothing_is_kept():
    kv = make(reuse=False)
    prompt = tokens_of(*range(9))
    fill(kv, 0, prompt, 9, 9)
    kv.free(0)
    assert kv.add_sequence(1, prompt, 9) == CachedPrefix(0, 0)
    assert kv.num_cached_blocks == 0


def test_a_block_released_too_often_is_noticed():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


@given(data=st.data(), size=st.sampled_from([1, 2, 4]))
def test_a_commit_below_its_bounds_has_nothing_to_do(data, size):
    """Against a manager that commits every time."""
    managers = [KVCacheManager(24, size, 2, 12) for _ in range(2)]
    tokens = [np.array(data.draw(st.lists(st.integers(0, 1), min_size=12, max_size=12)), np.int32) for _ in range(2)]
    state = {}
    for slot in range(2):
        prefixes = {kv.add_sequence(slot, tokens[slot], 12) for kv in managers}
        assert len(prefixes) == 1
        prefix = prefixes.pop()
        state[slot] = [prefix.num_cached_tokens, prefix.num_draft_cached_tokens]
    for _ in range(data.draw(st.integers(1, 12))):
        slot = data.draw(st.integers(0, 1))
        state[slot][0] = computed = data.draw(st.integers(state[slot][0], 12))
        state[slot][1] = draft_computed = data.draw(st.integers(0, 12))  # drafts that were dropped take it back
        for kv in managers:
            kv.allocate(slot, computed)
            full, draft_full, _ = kv.bounds[slot].tolist()
            if kv is managers[1] or computed >= full or draft_computed >= draft_full:
                kv.commit(slot, tokens[slot], computed, draft_computed)
            kv.check_integrity()
    pools = [vars(kv._pool) for kv in managers]
    assert pools[0] == pools[1]
    for slot in range(2):
        quick, thorough = (kv._sequences[slot] for kv in managers)
        assert quick.num_registered == thorough.num_registered == state[slot][0] // size
        assert quick.num_draft_registered == thorough.num_draft_registered


def test_what_was_computed_from_discarded_blocks_goes_with_them():
    """Another sequence reuses the first block, has computed one after it, and computes another one later."""
    kv, tokens = make(), tokens_of(*range(12))
    fill(kv, 0, tokens[:4], 4, 4)
    assert kv.add_sequence(1, tokens, 12) == CachedPrefix(4, 4)
    assert kv.allocate(1, 12)
    kv.commit(1, tokens, 8, 8)
    assert kv.num_cached_blocks == 2
    kv.discard(0)
    kv.check_integrity()
    kv.commit(1, tokens, 12, 12)
    assert kv.num_cached_blocks == 0
    kv.free(0)
    assert kv.add_sequence(2, tokens, 12) == CachedPrefix(0, 0)
    assert kv.allocate(2, 12)
    kv.commit(2, tokens, 12, 12)
    assert kv.num_cached_blocks == 3
    kv.check_integrity()


class CacheMachine(RuleBasedStateMachine):
    """Random sequences over two token values, so that prefixes are often equal; KV contents are modeled as text."""

    @initialize(num_blocks=st.integers(2, 12), tokens_per_block=st.sampled_from([1, 2, 4]), reuse=st.booleans())
    def start(self, num_blocks, tokens_per_block, reuse):
        self.size = tokens_per_block
        self.kv = KVCacheManager(num_blocks, tokens_per_block, 4, num_blocks, enable_block_reuse=reuse)
        self.contents = [[None] * tokens_per_block for _ in range(num_blocks)]  # the whole prefix at each token
        self.draft_contents = [[None] * tokens_per_block for _ in range(num_blocks)]
        self.sequences = {}  # slot -> [tokens, num_computed, num_draft_computed]
        self.passes = [frozenset()] * num_blocks  # the passes on which a block's contents depend
        self.num_passes, self.wrong = 0, set()

    def _passes_of(self, slot, end):
        blocks = self.kv.block_table[slot, : -(-end // self.size)].tolist()
        return frozenset().union(*(self.passes[block] for block in blocks))

    def _write(self, memory, slot, tokens, start, end):
        for position in range(start, end):
            block = self.kv.block_table[slot, position // self.size]
            memory[block][position % self.size] = tuple(tokens[: position + 1])

    def _holds(self, memory, slot, tokens, end):
        for position in range(end):
            block = self.kv.block_table[slot, position // self.size]
            assert memory[block][position % self.size] == tuple(tokens[: position + 1])

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def add(self, tokens):
        slot = next(s for s in range(4) if s not in self.sequences)
        prefix = self.kv.add_sequence(slot, np.array(tokens, np.int32), len(tokens))
        assert prefix.num_cached_tokens < len(tokens)
        assert prefix.num_draft_cached_tokens <= prefix.num_cached_tokens
        self._holds(self.contents, slot, tokens, prefix.num_cached_tokens)
        self._holds(self.draft_contents, slot, tokens, prefix.num_draft_cached_tokens)
        assert self.wrong.isdisjoint(self._passes_of(slot, prefix.num_cached_tokens)), "what was discarded is reused"
        self.sequences[slot] = [list(tokens), prefix.num_cached_tokens, prefix.num_draft_cached_tokens]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), extra=st.lists(st.integers(0, 1), max_size=6), with_draft=st.booleans())
    def compute(self, data, extra, with_draft):
        slot = data.draw(st.sampled_from(sorted(self.sequences)))
        tokens, computed, draft_computed = self.sequences[slot]
        tokens = tokens + extra
        free = self.kv.num_free_blocks
        if not self.kv.allocate(slot, len(tokens)):
            assert self.kv.num_blocks_for(len(tokens)) - self.kv.num_held_blocks(slot) > free
            return
        end = data.draw(st.integers(computed, len(tokens)))
        self._write(self.contents, slot, tokens, computed, end)
        if end > computed:
            self.num_passes += 1
            passes = self._passes_of(slot, computed) | {self.num_passes}
            for block in self.kv.block_table[slot, computed // self.size : -(-end // self.size)]:
                self.passes[block] = passes
        draft_end = max(draft_computed, end) if with_draft else draft_computed
        self._write(self.draft_contents, slot, tokens, draft_computed, draft_end)
        self.kv.commit(slot, np.array(tokens, np.int32), end, draft_end)
        self.kv.rewind(slot, max(end, data.draw(st.integers(end, len(tokens)))))
        self.sequences[slot] = [tokens[: max(end, 1)] if end >= 1 else tokens[:1], end, draft_end]
        self._holds(self.contents, slot, tokens, end)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def discard(self, data):
        slot = data.draw(st.sampled_from(sorted(self.sequences)))
        self.kv.discard(slot)
        self.wrong |= self._passes_of(slot, self.sequences[slot][1])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data):
        slot = data.draw(st.sampled_from(sorted(self.sequences)))
        self.kv.free(slot)
        del self.sequences[slot]

    @invariant()
    def audit(self):
        if hasattr(self, "kv"):
            self.kv.check_integrity()
            if not self.sequences:
                assert self.kv.num_free_blocks == self.kv.num_blocks


CacheMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
TestCacheMachine = CacheMachine.TestCase


def cached_tokens(kv, slot, tokens, salt):
    """Tokens of a prompt that are found, after it has run once more under this salt."""
    prefix = kv.add_sequence(slot, tokens, tokens.size, salt)
    assert kv.allocate(slot, tokens.size)
    kv.commit(slot, tokens, tokens.size, 0)
    kv.free(slot)
    return prefix.num_cached_tokens


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", "b", "0"]), st.lists(st.integers(0, 1), min_size=1, max_size=9)),
        min_size=1,
        max_size=25,
    )
)
def test_a_prefix_is_found_under_its_own_salt_only(requests):
    """Hits are those of a cache of its own for every salt."""
    kv, own = make(num_blocks=400), {}
    for salt, tokens in requests:
        tokens = np.array(tokens, np.int32)
        alone = own.setdefault(salt, make(num_blocks=400))
        assert cached_tokens(kv, 0, tokens, salt) == cached_tokens(alone, 0, tokens, "")
        kv.check_integrity()


def test_guesses_under_other_salts_find_nothing():
    """An attacker knows all prompts and half of the salts' characters, while blocks are evicted and allocated again."""
    rng = np.random.default_rng(5)
    kv = make(num_blocks=300)
    prompts = [rng.integers(0, 50, 24).astype(np.int32) for _ in range(6)]
    num_trials, num_found = pick(20_000, 100_000), 0
    for trial in range(num_trials):
        victim = SamplingParams(cache_salt=f"tenant {trial % 7}", cache_salt_id=(None, 5)[trial % 2]).salt
        tokens = prompts[trial % 6]
        if trial % 4 == 0:
            cached_tokens(kv, 0, tokens, victim)
        guess = SamplingParams(cache_salt=f"tenant {rng.integers(7, 99)}", cache_salt_id=(None, 5, 6)[trial % 3]).salt
        attack = kv.add_sequence(1, tokens, tokens.size, (guess, "", "5:", "5", ":5")[trial % 5])
        kv.free(1)
        assert (attack.num_cached_tokens, attack.num_draft_cached_tokens) == (0, 0)
        own = kv.add_sequence(1, tokens, tokens.size, victim)
        kv.free(1)
        num_found += own.num_cached_tokens > 0
    assert num_found > num_trials // 4, "the victims find their own"


def test_salts_that_differ_have_roots_that_differ():
    texts, numbers = (None, "", "5", "5:", ":", ":5", "x"), (None, 0, 5, 55, 2**64 - 1)
    roots = {}
    for text in texts:
        for number in numbers:
            asked = (text or None, number)  # an empty text is none
            roots.setdefault(SamplingParams(cache_salt=text, cache_salt_id=number).salt, set()).add(asked)
    assert all(len(asked) == 1 for asked in roots.values())
    assert SamplingParams().salt == ""
