"""Which scheduler and which KV cache manager an executor has: ours, or TensorRT-LLM's behind the same protocols."""

from __future__ import annotations

from faser_trtllm.config import ContextChunkingPolicy, ExecutorConfig, SchedulerKind
from faser_trtllm.core.clock import Clock
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.errors import ConfigError
from faser_trtllm.kvcache.base import KVCache
from faser_trtllm.kvcache.manager import KVCacheManager
from faser_trtllm.kvcache.trtllm import TrtllmKVCacheManager
from faser_trtllm.policy.base import Policy
from faser_trtllm.scheduler.scheduler import Scheduler, SchedulerLimits
from faser_trtllm.scheduler.trtllm import TrtllmScheduler
from faser_trtllm.trtllm.gate import load_bindings


def check_scheduler(config: ExecutorConfig) -> None:
    """Raise ConfigError if the scheduler that is asked for cannot be had; cheap, so it comes before the engines."""
    chunking = config.scheduler_config.context_chunking_policy
    if config.scheduler is SchedulerKind.TRTLLM:
        load_bindings()
    elif chunking is not ContextChunkingPolicy.FIRST_COME_FIRST_SERVED:
        raise ConfigError(
            f"scheduler_config.context_chunking_policy is {chunking.value}, the native scheduler has "
            "FIRST_COME_FIRST_SERVED only; set scheduler to trtllm or leave it out"
        )


def make_kv_cache(config: ExecutorConfig, spec: EngineSpec, max_seq_len: int) -> KVCache:
    """Blocks for the engines of a spec."""
    size = spec.tokens_per_block
    if config.scheduler is SchedulerKind.TRTLLM:
        return TrtllmKVCacheManager(load_bindings(), spec.num_blocks, size, spec.max_batch_size, max_seq_len)
    return KVCacheManager(
        spec.num_blocks,
        size,
        spec.max_batch_size,
        -(-max_seq_len // size),
        enable_block_reuse=config.kv_cache_config.enable_block_reuse,
    )


def make_scheduler(
    config: ExecutorConfig, kv: KVCache, limits: SchedulerLimits, policy: Policy, clock: Clock
) -> Scheduler:
    """The scheduler over what make_kv_cache returned for the same configuration."""
    if isinstance(kv, TrtllmKVCacheManager):
        chunking = config.scheduler_config.context_chunking_policy
        return TrtllmScheduler(load_bindings(), kv, limits, policy, clock, chunking)
    return Scheduler(kv, limits, policy, clock)
