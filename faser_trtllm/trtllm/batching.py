"""In-flight batching by TensorRT-LLM, as the executor asks for it (executor/batching.py)."""

from __future__ import annotations

from faser_trtllm.config import ExecutorConfig
from faser_trtllm.core.clock import Clock
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.kvcache.base import KVCache
from faser_trtllm.policy.base import Policy
from faser_trtllm.scheduler.limits import SchedulerLimits
from faser_trtllm.scheduler.scheduler import Scheduler
from faser_trtllm.trtllm.gate import load_bindings
from faser_trtllm.trtllm.kv_cache import TrtllmKVCacheManager
from faser_trtllm.trtllm.scheduler import TrtllmScheduler


class TrtllmBatching:
    """TensorRT-LLM's schedulers over its KV cache manager."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._bindings = load_bindings()
        self._chunking = config.scheduler_config.context_chunking_policy

    def open(
        self, spec: EngineSpec, limits: SchedulerLimits, policy: Policy, clock: Clock
    ) -> tuple[KVCache, Scheduler]:
        kv = TrtllmKVCacheManager(
            self._bindings, spec.num_blocks, spec.tokens_per_block, spec.max_batch_size, limits.max_seq_len
        )
        return kv, TrtllmScheduler(self._bindings, kv, limits, policy, clock, self._chunking)
