"""The reference of ops/cuda/verify_attention.py."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from faser_trtllm.ops.cuda.tensors import PagedKv
from faser_trtllm.ops.cuda.verify_attention import BUT_FIRST, default_scale

if TYPE_CHECKING:
    from torch import Tensor


def verify_attention_reference(
    q: Tensor,
    kv: PagedKv,
    *,
    scale: float | None = None,
    window: int = 0,
    is_causal: bool = True,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of every row over its request's positions, of q's shape and type, computed in fp32."""
    import torch

    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, tokens_per_block, _ = kv.k_cache.shape
    group, num_table_positions = num_heads // num_kv_heads, kv.block_table.shape[-1] * tokens_per_block
    scale = default_scale(head_dim) if scale is None else scale
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    offsets = kv.cu_q_lens.clamp(0, num_rows).tolist()
    for b, kv_len in enumerate(kv.kv_lens.tolist()):
        rows = range(offsets[b], max(offsets[b], offsets[b + 1]))
        end = max(0, min(kv_len, num_table_positions))
        if not rows or end == 0:
            continue
        keys = _kv_values(kv.k_cache, kv.block_table[b], end, k_scale).repeat_interleave(group, 1)
        values = _kv_values(kv.v_cache, kv.block_table[b], end, v_scale).repeat_interleave(group, 1)
        places = torch.arange(end, device=q.device)
        limits = kv_len - len(rows) + torch.arange(len(rows), device=q.device)
        seen = places <= (limits if is_causal else torch.full_like(limits, kv_len))[:, None]
        if window > 0:
            seen &= places > limits[:, None] - window
        elif window == BUT_FIRST:
            seen[:, 0] &= limits == 0
        scores = torch.einsum("rhd,phd->hrp", q[rows.start : rows.stop].float(), keys) * scale
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(rows), 1)), -1)
        weights = scores.softmax(-1)[..., :end]
        weights = torch.where(seen.any(-1)[None, :, None], weights, torch.zeros_like(weights))
        out[rows.start : rows.stop] = torch.einsum("hrp,phd->rhd", weights, values)
    return out.to(q.dtype)


def _kv_values(cache: Tensor, blocks: Tensor, num_tokens: int, scale: float) -> Tensor:
    """Return a request's first positions, fp32 [num_tokens, num_kv_heads, head_dim]; zeros without a block.

    cache [num_blocks, num_kv_heads, tokens_per_block, head_dim]; blocks: the request's row of the block table.
    """
    import torch

    num_blocks, _, tokens_per_block, _ = cache.shape
    places = torch.arange(num_tokens, device=cache.device)
    ids = blocks.to(torch.int64)[places // tokens_per_block]
    exists = (ids >= 0) & (ids < num_blocks)
    if num_blocks == 0:
        return torch.zeros((num_tokens, cache.shape[1], cache.shape[3]), device=cache.device)
    values = cache[ids.clamp(0, num_blocks - 1), :, places % tokens_per_block].float() * scale
    return torch.where(exists[:, None, None], values, torch.zeros_like(values))
