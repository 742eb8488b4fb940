"""Batching implementations by name: a scheduler, and the KV cache manager that it allocates from."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

from faser_trtllm.config import ContextChunkingPolicy, ExecutorConfig, SchedulerKind
from faser_trtllm.core.clock import Clock
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.errors import ConfigError
from faser_trtllm.kvcache.base import KVCache
from faser_trtllm.kvcache.manager import KVCacheManager
from faser_trtllm.policy.base import Policy
from faser_trtllm.scheduler.limits import SchedulerLimits
from faser_trtllm.scheduler.scheduler import Scheduler

Batching = Callable[[EngineSpec, SchedulerLimits, Policy, Clock], tuple[KVCache, Scheduler]]
"""Opens the KV cache for engines of a spec, and a scheduler that uses it."""

_BATCHINGS = {
    SchedulerKind.NATIVE: "faser_trtllm.executor.batching:native_batching",
    SchedulerKind.TRTLLM: "faser_trtllm.trtllm.batching:trtllm_batching",
}


def make_batching(config: ExecutorConfig) -> Batching:
    """Import the scheduler that config names, before engines are opened; raise ConfigError if it is not available or
    does not support the configuration."""
    batching: Batching = resolve_name(_BATCHINGS[config.scheduler])(config)
    return batching


def native_batching(config: ExecutorConfig) -> Batching:
    """Return the project's own scheduler and KV cache."""
    chunking = config.scheduler_config.context_chunking_policy
    if chunking is not ContextChunkingPolicy.FIRST_COME_FIRST_SERVED:
        raise ConfigError(
            f"scheduler_config.context_chunking_policy is {chunking.value}, the native scheduler has "
            "FIRST_COME_FIRST_SERVED only; set scheduler to trtllm or leave it out"
        )

    def open_native(
        spec: EngineSpec, limits: SchedulerLimits, policy: Policy, clock: Clock
    ) -> tuple[KVCache, Scheduler]:
        kv = KVCacheManager(
            spec.num_blocks,
            spec.tokens_per_block,
            spec.max_batch_size,
            -(-limits.max_seq_len // spec.tokens_per_block),
            enable_block_reuse=config.kv_cache_config.enable_block_reuse,
            num_branch_rows=spec.max_num_branches,
        )
        return kv, Scheduler(kv, limits, policy, clock)

    return open_native
