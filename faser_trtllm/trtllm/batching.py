"""The executor's in-flight batching with TensorRT-LLM's schedulers."""

from __future__ import annotations

from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.clock import Clock
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.executor.batching import Batching
from faser_trtllm.kvcache.base import KVCache
from faser_trtllm.policy.base import Policy
from faser_trtllm.scheduler.limits import SchedulerLimits
from faser_trtllm.scheduler.scheduler import Scheduler
from faser_trtllm.trtllm.gate import load_bindings
from faser_trtllm.trtllm.kv_cache import TrtllmKVCacheManager
from faser_trtllm.trtllm.scheduler import TrtllmScheduler


def trtllm_batching(config: ExecutorConfig) -> Batching:
    """Return batching by TensorRT-LLM's schedulers and KV cache manager; raise ConfigError if they are missing."""
    bindings, chunking = load_bindings(), config.scheduler_config.context_chunking_policy

    def open_trtllm(
        spec: EngineSpec, limits: SchedulerLimits, policy: Policy, clock: Clock
    ) -> tuple[KVCache, Scheduler]:
        sizes = spec.num_blocks, spec.tokens_per_block, spec.max_batch_size
        kv = TrtllmKVCacheManager(bindings, *sizes, limits.max_seq_len)
        return kv, TrtllmScheduler(bindings, kv, limits, policy, clock, chunking)

    return open_trtllm
