"""What a cuda engine is opened with."""

from __future__ import annotations

from dataclasses import dataclass

from faser_trtllm.engine.cuda_graphs import DEFAULT_GRAPH_BYTES
from faser_trtllm.engine.cuda_weights import DeviceWeights
from faser_trtllm.errors import ConfigError

MAX_GRAPH_ROWS = 256
"""Larger passes are compute bound: what launching costs the host is hidden, and padding would cost time."""


@dataclass(frozen=True, slots=True)
class CudaLimits:
    """What an engine is opened with. max_logit_rows: rows of one pass whose logits may be asked for.

    max_draft_len: of a draft model, else 0. max_graph_rows: passes of up to so many rows are padded to a bucket, and
    replayed where start-up captured a graph. graph_bytes: device memory for graphs, at most (the last one may pass it).
    """

    num_blocks: int
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_logit_rows: int
    max_draft_len: int = 0
    max_graph_rows: int = MAX_GRAPH_ROWS
    graph_bytes: int = DEFAULT_GRAPH_BYTES

    def check(self, weights: DeviceWeights) -> None:
        """Raise ConfigError for limits that cannot be with these weights."""
        for name in ("num_blocks", "max_batch_size", "max_num_tokens", "max_logit_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.tokens_per_block < 16 or self.tokens_per_block % 16:
            raise ConfigError(f"tokens_per_block is {self.tokens_per_block}, it must be a multiple of 16")
        longest = weights.sizes["max_seq_len"]
        if not 1 <= self.max_seq_len <= longest:
            raise ConfigError(f"max_seq_len is {self.max_seq_len}, the engine allows 1 to {longest}")
