"""The scheduler's limits per step, resolved once."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.config import CapacitySchedulerPolicy


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """TensorRT-LLM's names. max_num_tokens: target rows of one pass, at least max_batch_size. max_logit_rows: those of
    them with logits, at least max_batch_size and enough for all drafts; None: all."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_draft_len: int
    capacity_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    enable_chunked_context: bool = True
    chunk_unit_size: int = 16
    max_logit_rows: int | None = None

    def __post_init__(self) -> None:
        assert self.max_num_tokens >= self.max_batch_size, "each request of a pass needs at least one row"

    @property
    def chunk_unit(self) -> int:
        """chunk_unit_size, or less where a full batch would leave too few rows for any chunk to progress."""
        return max(1, min(self.chunk_unit_size, self.max_num_tokens - self.max_batch_size + 1))
