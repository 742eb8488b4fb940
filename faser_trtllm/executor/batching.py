"""Batching implementations by name: a scheduler and the KV cache manager it allocates from."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Protocol

from faser_trtllm.config import ContextChunkingPolicy, ExecutorConfig, SchedulerKind
from faser_trtllm.core.clock import Clock
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.errors import ConfigError
from faser_trtllm.kvcache.base import KVCache
from faser_trtllm.kvcache.manager import KVCacheManager
from faser_trtllm.policy.base import Policy
from faser_trtllm.scheduler.limits import SchedulerLimits
from faser_trtllm.scheduler.scheduler import Scheduler


class Batching(Protocol):
    """Constructed from a configuration before the engines are opened: cheap, and raises ConfigError for unsupported
    settings."""

    def __init__(self, config: ExecutorConfig) -> None: ...

    def open(
        self, spec: EngineSpec, limits: SchedulerLimits, policy: Policy, clock: Clock
    ) -> tuple[KVCache, Scheduler]:
        """The KV cache for engines of this spec, and the scheduler over it."""


class NativeBatching:
    """Ours."""

    def __init__(self, config: ExecutorConfig) -> None:
        chunking = config.scheduler_config.context_chunking_policy
        if chunking is not ContextChunkingPolicy.FIRST_COME_FIRST_SERVED:
            raise ConfigError(
                f"scheduler_config.context_chunking_policy is {chunking.value}, the native scheduler has "
                "FIRST_COME_FIRST_SERVED only; set scheduler to trtllm or leave it out"
            )
        self._enable_block_reuse = config.kv_cache_config.enable_block_reuse

    def open(
        self, spec: EngineSpec, limits: SchedulerLimits, policy: Policy, clock: Clock
    ) -> tuple[KVCache, Scheduler]:
        size = spec.tokens_per_block
        kv = KVCacheManager(
            spec.num_blocks,
            size,
            spec.max_batch_size,
            -(-limits.max_seq_len // size),
            enable_block_reuse=self._enable_block_reuse,
            num_branch_rows=spec.max_num_branches,
        )
        return kv, Scheduler(kv, limits, policy, clock)


_BATCHINGS = {
    SchedulerKind.NATIVE: "faser_trtllm.executor.batching:NativeBatching",
    SchedulerKind.TRTLLM: "faser_trtllm.trtllm.batching:TrtllmBatching",
}


def make_batching(config: ExecutorConfig) -> Batching:
    """Import what config.scheduler names; ConfigError if it is not available."""
    batching: Batching = resolve_name(_BATCHINGS[config.scheduler])(config)
    return batching
