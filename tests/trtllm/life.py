"""Random lives of many requests under TensorRT-LLM's schedulers: tests/scheduler's, with the adapters in place."""

from __future__ import annotations

from faser_trtllm.kvcache.trtllm import TrtllmKVCacheManager
from faser_trtllm.scheduler.trtllm import TrtllmScheduler
from faser_trtllm.trtllm.gate import load_bindings
from tests.scheduler.test_random_steps import MAX_SEQ_LEN, Life, RandomPolicy, ToyPair


class CountingScheduler(TrtllmScheduler):
    """Notes when pending drafts are given up for want of blocks."""

    def __init__(self, seen, *arguments):
        super().__init__(*arguments)
        self._seen = seen

    def _give_up_drafts(self, request, num_kept):
        self._seen["given_up"] += 1
        super()._give_up_drafts(request, num_kept)


class TrtllmLife(Life):
    """Every check of the native scheduler's lives holds here, too."""

    def __init__(self, seed, *, chunking_policy, **options):
        super().__init__(seed, reuse=False, **options)
        bindings, limits, policy = load_bindings(), self.limits, RandomPolicy(self.rng)
        self.kv = TrtllmKVCacheManager(
            bindings, self.kv.num_blocks, self.kv.tokens_per_block, limits.max_batch_size, MAX_SEQ_LEN
        )
        self.scheduler = CountingScheduler(self.seen, bindings, self.kv, limits, policy, self.clock, chunking_policy)
        self.pair = ToyPair(self.kv, self.rng, policy)
