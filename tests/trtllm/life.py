"""Random lives of many requests under TensorRT-LLM's schedulers: tests/scheduler's, with the adapters in place."""

from __future__ import annotations

from faser_trtllm.trtllm.gate import load_bindings
from faser_trtllm.trtllm.kv_cache import TrtllmKVCacheManager
from faser_trtllm.trtllm.scheduler import TrtllmScheduler
from tests.scheduler.random_lives import MAX_SEQ_LEN, Life, RandomPolicy, ToyPair


class TrtllmLife(Life):
    """Every check of the native scheduler's lives holds here, too."""

    def __init__(self, seed, *, chunking_policy, **options):
        super().__init__(seed, reuse=False, **options)
        bindings, limits, policy = load_bindings(), self.limits, RandomPolicy(self.rng)
        self.kv = TrtllmKVCacheManager(
            bindings, self.kv.num_blocks, self.kv.tokens_per_block, limits.max_batch_size, MAX_SEQ_LEN
        )
        self.scheduler = TrtllmScheduler(bindings, self.kv, limits, policy, self.clock, chunking_policy)
        self.pair = ToyPair(self.kv, self.rng, policy)

    def check_blocks(self, item, end, held):
        """Pending drafts that TensorRT-LLM counted no blocks for may wait, without rows and without further drafts."""
        assert held >= end + item.max_verified, "rows without blocks"
        if held < end + item.num_drafts:
            assert item.num_drafts == item.request.num_drafts, "drafts without blocks"
            self.seen["drafts_without_blocks"] += 1
