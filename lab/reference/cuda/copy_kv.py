"""References of ops/cuda/copy_kv.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
from faser_trtllm.ops.cuda.copy_kv import _shape_of


def copy_kv_reference(copies: Tensor, cache: Tensor) -> None:
    """Copy tokens between blocks, in torch on any device.

    copies int32 [4, n] of source block, target block, first offset and end offset. cache [num_planes, num_blocks,
    num_heads, tokens_per_block, head_dim], of any type and contiguous: a plane is a layer's keys or values. Copies with
    a block or an offset out of range do nothing. A copy must not write a token that another reads or writes.
    """
    _, num_blocks, _, tokens_per_block, _ = _shape_of(cache)
    for source, target, first, end in copies.t().tolist():
        if all(0 <= block < num_blocks for block in (source, target)) and 0 <= first < end <= tokens_per_block:
            cache[:, target, :, first:end] = cache[:, source, :, first:end]
