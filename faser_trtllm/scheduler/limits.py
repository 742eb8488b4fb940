"""The scheduler's limits per step, resolved once."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.config import CapacitySchedulerPolicy
from faser_trtllm.core.request import Request
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.kvcache.base import KVCache


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits with TensorRT-LLM's names."""

    max_batch_size: int
    max_num_tokens: int  # target rows of one pass, at least max_batch_size
    max_seq_len: int
    max_draft_len: int
    capacity_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    enable_chunked_context: bool = True
    chunk_unit_size: int = 16
    max_logit_rows: int | None = None  # rows with logits, at least max_batch_size and enough for all drafts; None: all
    max_draft_rows: int = 2  # per request in a draft call's first pass; more make up for tokens the draft model missed

    def __post_init__(self) -> None:
        assert self.max_num_tokens >= self.max_batch_size, "each request of a pass needs at least one row"

    @property
    def chunk_unit(self) -> int:
        """chunk_unit_size, or less if a full batch would leave too few rows for any chunk to progress."""
        return max(1, min(self.chunk_unit_size, self.max_num_tokens - self.max_batch_size + 1))


def check_room(request: Request, limits: SchedulerLimits, kv: KVCache) -> None:
    """Raise InvalidArgumentError if the request could never run."""
    if not limits.enable_chunked_context and request.prompt_len > limits.max_num_tokens:
        raise InvalidArgumentError(
            f"has {request.prompt_len} tokens, max_num_tokens is {limits.max_num_tokens} and "
            "enable_chunked_context is off; shorten the prompt or turn it on",
            "prompt",
            request.prompt_len,
            limits.max_num_tokens,
        )
    if kv.num_blocks_for(request.max_num_tokens) > kv.num_blocks:
        num_tokens, room = request.max_num_tokens, kv.num_blocks * kv.tokens_per_block
        raise InvalidArgumentError(
            f"and prompt are {num_tokens} tokens, the KV cache holds {room}; lower max_tokens or raise "
            "kv_cache_config.max_tokens",
            "max_tokens",
            num_tokens,
            room,
        )
