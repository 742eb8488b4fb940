"""The limits that a GPU engine is opened with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.buckets import MAX_GRAPH_ROWS
from faser_trtllm.engine.gpu.graphs import DEFAULT_GRAPH_BYTES
from faser_trtllm.errors import ConfigError


def most_logit_rows(spec: EngineSpec) -> int:
    """Return the largest number of logit rows of a pass, branches included."""
    rows = (spec.max_logit_rows or spec.max_num_tokens) + spec.max_num_branches
    return min(rows, max(spec.max_num_tokens, spec.max_batch_size))


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """The limits that a GPU engine is opened with."""

    num_blocks: int
    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_logit_rows: int  # per pass, without branches
    max_draft_len: int = 0  # of a draft model, else 0
    max_graph_rows: int = MAX_GRAPH_ROWS  # graphs of up to this many rows compute the logits of all of them
    graph_bytes: int = DEFAULT_GRAPH_BYTES  # device memory budget for graphs, which the last one may exceed
    max_num_branches: int = 0  # per pass of a target
    keeps_runners_up: bool = False  # of a draft whose target runs branches

    @classmethod
    def of(cls, limits: BuildConfig, num_blocks: int, *, has_drafts: bool, num_branches: int = 0) -> GpuLimits:
        """Return limits for an executor's engine. has_drafts: it drafts on the device. num_branches: per request."""
        return cls(
            num_blocks=num_blocks,
            tokens_per_block=limits.tokens_per_block,
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            max_logit_rows=limits.max_batch_size * (1 + limits.max_draft_len),
            max_draft_len=limits.max_draft_len if has_drafts else 0,
            max_num_branches=0 if has_drafts else num_branches * limits.max_batch_size,
            keeps_runners_up=has_drafts and num_branches > 0,
        )

    def spec(self, sizes: Mapping[str, Any], segments: tuple[int, ...]) -> EngineSpec:
        """Return the spec of a model of these sizes (the file's `model` object). Raises ConfigError if it cannot meet
        the limits."""
        for name in ("num_blocks", "max_batch_size", "max_num_tokens", "max_logit_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 1 <= self.max_seq_len <= sizes["max_seq_len"]:
            raise ConfigError(f"max_seq_len is {self.max_seq_len}, the engine allows 1 to {sizes['max_seq_len']}")
        return EngineSpec(
            vocab_size=sizes["vocab_size"],
            max_seq_len=self.max_seq_len,
            num_layers=sizes["num_layers"],
            num_blocks=self.num_blocks,
            tokens_per_block=self.tokens_per_block,
            max_num_tokens=self.max_num_tokens,
            max_batch_size=self.max_batch_size,
            segments=segments,
            max_num_branches=self.max_num_branches,
            max_logit_rows=max(min(self.max_logit_rows, self.max_num_tokens), self.max_batch_size),
            is_head="head" in sizes or "medusa" in sizes,
            block_size=sizes.get("block", {}).get("block_size", 0),
            **{name: int(sizes.get("experts", {}).get(name, 0)) for name in ("num_experts", "top_k")},
        )
