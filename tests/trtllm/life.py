"""Random lives of many requests under TensorRT-LLM's schedulers: tests/scheduler's, with the adapters in place."""

from __future__ import annotations

from faser_trtllm.core.request import RequestState
from faser_trtllm.kvcache.trtllm import TrtllmKVCacheManager
from faser_trtllm.scheduler.trtllm import TrtllmScheduler
from faser_trtllm.trtllm.gate import load_bindings
from tests.scheduler.test_random_steps import MAX_SEQ_LEN, Life, RandomPolicy, ToyPair


class TrtllmLife(Life):
    """Pending drafts beyond what may be verified hold no blocks here, and a pass may leave somebody out."""

    def __init__(self, seed, *, chunking_policy, **options):
        super().__init__(seed, reuse=False, **options)
        bindings, limits, policy = load_bindings(), self.limits, RandomPolicy(self.rng)
        self.kv = TrtllmKVCacheManager(
            bindings, self.kv.num_blocks, self.kv.tokens_per_block, limits.max_batch_size, MAX_SEQ_LEN
        )
        self.scheduler = TrtllmScheduler(bindings, self.kv, limits, policy, self.clock, chunking_policy)
        self.pair = ToyPair(self.kv, self.rng, policy)

    def check_plan(self, plan):
        assert bool(plan.scheduled) == bool(self.live), "a step with requests must do some work"
        assert plan.num_rows <= self.limits.max_num_tokens
        assert len({s.request.slot for s in plan.scheduled}) == len(plan.scheduled) <= self.limits.max_batch_size
        assert all(s.request.state is RequestState.RUNNING for s in plan.scheduled)
        for item in plan.scheduled:
            request, end = item.request, item.request.num_computed_tokens + item.num_new_tokens
            assert request.num_computed_tokens <= end <= request.num_tokens
            assert 0 <= item.max_verified <= item.num_drafts
            assert request.num_drafts <= item.num_drafts <= max(request.num_drafts, request.draft_limit)
            new_drafts = item.num_drafts if item.num_drafts > request.num_drafts else 0
            held = self.kv.num_held_blocks(request.slot) * self.kv.tokens_per_block
            assert held >= end + max(item.max_verified, new_drafts), "rows or drafts without blocks"
            self.seen["only_drafted"] += not item.num_new_tokens
