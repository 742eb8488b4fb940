"""References of ops/cuda/append_kv.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.ops.cuda.tensors import (
    E4M3_MAX,
    PagedKv,
)

if TYPE_CHECKING:
    from torch import Tensor
from faser_trtllm.ops.cuda.append_kv import QkvNorm, Rope, _check_branches, _check_norm, _check_scales, shape_of


def append_kv_reference(
    qkv: Tensor,
    rope: Rope,
    kv: PagedKv,
    q_rotated: Tensor,
    *,
    norm: QkvNorm | None = None,
    first_branch: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Rotate q and k of every row (Hugging Face's half-split rope, in fp32) and write k and v at the rows' positions.

    qkv [num_rows, (num_heads + 2 num_kv_heads) * head_dim] bf16 or fp16; q_rotated [num_rows, num_heads, head_dim] of
    qkv's type. A cache of e4m3 saturates at 448. Nothing is written for a row outside all requests, for a position
    outside [0, kv_len) or [0, max_seq_len), or in a block that does not exist; the query is then rotated with the
    nearest position in range.

    norm (see QkvNorm): qkv is a product of rows that were not normalized, in fp32 if q_rotated is fp16, whose range it
    may leave. first_branch int32 [batch_size + 1], with a norm only: the branches of request i are the requests
    first_branch[i] to first_branch[i + 1], one row each; the rows of i before a branch in the same block are written to
    the branch's block, too.
    """
    import torch

    shape = shape_of(qkv, rope, kv, q_rotated, is_normed=norm is not None)
    _check_scales(k_scale, v_scale)
    _check_branches(shape, norm, first_branch)
    if norm is not None:
        _check_norm(shape, qkv, norm)
        qkv = normed_qkv(qkv.float(), shape.num_heads, shape.num_kv_heads, norm)
    heads = qkv.float().view(shape.num_rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    angles = rope.positions.long().clamp(0, shape.max_seq_len - 1)
    c, s = rope.cos[angles][:, None], rope.sin[angles][:, None]
    low, high = heads.chunk(2, -1)
    rotated = torch.cat((low * c - high * s, high * c + low * s), -1)
    q_rotated.copy_(rotated[:, : shape.num_heads])
    keys = rotated[:, shape.num_heads : shape.num_heads + shape.num_kv_heads]
    values = heads[:, shape.num_heads + shape.num_kv_heads :]
    if shape.kv_dtype == "e4m3":
        # fp32, as in the kernel.
        k_inverse, v_inverse = torch.tensor([k_scale, v_scale], dtype=torch.float32).reciprocal().tolist()
        keys = (keys * k_inverse).clamp(-E4M3_MAX, E4M3_MAX)
        values = (values * v_inverse).clamp(-E4M3_MAX, E4M3_MAX)
    offsets, lens, table = kv.cu_q_lens.tolist(), kv.kv_lens.tolist(), kv.block_table.tolist()
    places = rope.positions.tolist()
    for b in range(shape.batch_size):
        for row in range(max(0, offsets[b]), min(offsets[b + 1], shape.num_rows)):
            position = places[row]
            slot, offset = divmod(position, shape.tokens_per_block)
            if not 0 <= position < min(lens[b], shape.max_seq_len) or slot >= shape.max_blocks_per_seq:
                continue
            if not 0 <= table[b][slot] < shape.num_blocks:
                continue
            for owner in (b, *branches_before(first_branch, b, position, lens, shape.tokens_per_block)):
                if 0 <= (block := table[owner][slot]) < shape.num_blocks:
                    kv.k_cache[block, :, offset] = keys[row].to(kv.k_cache.dtype)
                    kv.v_cache[block, :, offset] = values[row].to(kv.v_cache.dtype)


def branches_before(
    first_branch: Tensor | None, request: int, position: int, kv_lens: list[int], tokens_per_block: int
) -> list[int]:
    """Return the request's branches after one of its positions in the same block, as in append_kv_reference."""
    if first_branch is None:
        return []
    begin, end = (min(max(int(place), 0), len(kv_lens)) for place in first_branch[request : request + 2])
    return [
        branch
        for branch in range(begin, end)
        if position + 1 < kv_lens[branch] and position // tokens_per_block == (kv_lens[branch] - 1) // tokens_per_block
    ]


def normed_qkv(qkv: Tensor, num_heads: int, num_kv_heads: int, norm: QkvNorm) -> Tensor:
    """Return new qkv [num_rows, width] in its type, fp32 or fp64, after `norm`."""
    import torch

    found = qkv * inverse_rms(norm.hidden.to(qkv.dtype), norm.eps)
    if norm.bias is not None:
        found += norm.bias.to(qkv.dtype)
    all_heads = num_heads + 2 * num_kv_heads
    heads = found.view(qkv.shape[0], all_heads, qkv.shape[1] // all_heads)
    parts = list(torch.tensor_split(heads, (num_heads, num_heads + num_kv_heads), 1))
    for place, weight in enumerate((norm.q_norm, norm.k_norm)):
        if weight is not None:
            parts[place] = parts[place] * inverse_rms(parts[place], norm.eps) * weight.to(qkv.dtype)
    return torch.cat(parts, 1).view(qkv.shape)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / the root mean square over the last dimension [..., 1]."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()
