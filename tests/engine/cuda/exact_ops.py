"""The cuda engine's ops in float64 over float32 memory: a row's result does not depend on what runs beside it.

Sums in float64 are in another order for another number of rows, but what is kept of them, a float32, is the same. So
speculation can be compared with no speculation bit for bit, which GEMMs in bf16 do not allow.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from benchmarks.gpu.reference_ops import ReferenceOps
from faser_trtllm.ops.cuda.experts.grouped_matmul import Mxfp4Matrices
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from faser_trtllm.ops.cuda.tensors import E4M3_MAX
from faser_trtllm.ops.cuda.verify_attention import BUT_FIRST
from lab.reference.cuda.append_kv import branches_before, normed_qkv
from lab.reference.cuda.experts.grouped_matmul import decoded
from lab.reference.cuda.gated_silu import gated_silu_reference


def stored(values, cache):
    """Return values in the dtype of the cache; e4m3 saturates."""
    return (values.clamp(-E4M3_MAX, E4M3_MAX) if cache.dtype is torch.float8_e4m3fn else values).to(cache.dtype)


def as_numbers(cache):
    """A cache for numpy, whose small steps are quicker than torch's; it has no e4m3, so those are bytes."""
    return (cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache).numpy()


def by_head(cache, blocks, num_tokens):
    """One request's first positions in float64 [num_kv_heads, num_tokens, head_dim]; zeros where there is no block."""
    num_blocks, num_kv_heads, tokens_per_block, head_dim = cache.shape
    ids = blocks[: -(-num_tokens // tokens_per_block)]
    found = (
        torch.from_numpy(as_numbers(cache)[np.minimum(np.maximum(ids, 0), num_blocks - 1)])
        .view(cache.dtype)
        .double()
        .numpy()
    )
    found[(ids < 0) | (ids >= num_blocks)] = 0
    return found.swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :num_tokens]


_doubled = WeakIdKeyDictionary()


def doubled(weight):
    """In float64, transposed: turned once, as long as the weight lives and is not written to."""
    version, found = _doubled.get(weight, (None, None))
    if version != weight._version:
        found = weight.double().t()
        _doubled[weight] = weight._version, found
    return found


class ExactOps(ReferenceOps):
    def linear(self, x, weight, scaled=None):
        if isinstance(weight, ScaledRows):
            return super().linear(x, weight, scaled)
        return (x.double() @ doubled(weight)).to(x.dtype)

    def add_linear(self, hidden, x, weight, bias):
        if isinstance(weight, ScaledRows):
            return super().add_linear(hidden, x, weight, bias)
        sums = hidden.double() + x.double() @ doubled(weight)
        hidden.copy_(sums if bias is None else sums + bias.double())
        return None

    def logits(self, x, lm_head, out):
        out.copy_(x.double() @ doubled(lm_head))

    def rms_norm(self, x, weight, eps):
        y = x.double()
        y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (y if weight is None else y * weight.double()).to(x.dtype)

    def gated_silu(self, gate_up, hidden, bias, eps):
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=hidden.dtype)
        gated_silu_reference(gate_up.double(), hidden, bias, eps, out)
        return out

    def grouped_linear(self, x, weights, ends):
        out = torch.full((x.shape[0], weights.shape[1]), math.nan, dtype=x.dtype)
        begin = 0
        if isinstance(weights, Mxfp4Matrices):
            weights = decoded(weights)
        for weight, end in zip(weights, ends.tolist(), strict=True):
            out[begin:end] = (x[begin:end].double() @ weight.double().t()).to(x.dtype)
            begin = end
        return out

    def append_kv(self, qkv, rope, kv, q_rotated, norm, first_branch=None):
        assert first_branch is None or norm is not None, "the launcher refuses branches without a norm"
        (cos, sin, positions), (k_cache, v_cache, block_table, cu_q_lens, kv_lens) = rope, kv
        num_rows, num_heads, head_dim = q_rotated.shape
        num_blocks, num_kv_heads, tokens_per_block, _ = k_cache.shape
        values = qkv.double() if norm is None else normed_qkv(qkv.double(), num_heads, num_kv_heads, norm)
        heads = values.view(num_rows, -1, head_dim)
        angles = positions.long().clamp(0, cos.shape[0] - 1)
        c, s = cos[angles][:, None].double(), sin[angles][:, None].double()
        low, high = heads.chunk(2, -1)
        rotated = torch.cat((low * c - high * s, high * c + low * s), -1).to(q_rotated.dtype)
        q_rotated.copy_(rotated[:, :num_heads])
        offsets, lens, known = cu_q_lens.tolist(), kv_lens.tolist(), positions.tolist()
        places = [
            (row, owner, known[row])
            for b, kv_len in enumerate(lens)
            for row in range(offsets[b], min(offsets[b + 1], num_rows))
            if known[row] < kv_len
            for owner in (b, *branches_before(first_branch, b, known[row], lens, tokens_per_block))
        ]
        if not places:
            return
        rows, owners, where = np.array(places).T
        blocks, offset = block_table.numpy()[owners, where // tokens_per_block], where % tokens_per_block
        assert ((blocks >= 0) & (blocks < num_blocks)).all()
        keys, values = rotated[rows, num_heads : num_heads + num_kv_heads], heads[rows, num_heads + num_kv_heads :]
        as_numbers(k_cache)[blocks, :, offset] = as_numbers(stored(keys, k_cache))
        as_numbers(v_cache)[blocks, :, offset] = as_numbers(stored(values, v_cache))

    def clamped_swiglu(self, gate_up, bias, ends):
        return super().clamped_swiglu(gate_up.double(), bias, ends).to(gate_up.dtype)

    def verify_attention(self, q, kv, out, *, window, max_query_rows, max_kv_len, is_causal=True, sinks=None):
        k_cache, v_cache, block_table, cu_q_lens, kv_lens = kv
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads, scale = k_cache.shape[1], 1 / math.sqrt(head_dim)
        group = num_heads // num_kv_heads
        out.zero_()
        offsets, lens, table = cu_q_lens.tolist(), kv_lens.tolist(), block_table.numpy()
        assert max(lens) <= max_kv_len
        for b, kv_len in enumerate(lens):
            begin, end = offsets[b], min(offsets[b + 1], num_rows)
            if begin >= end or kv_len == 0:
                continue
            count = end - begin
            assert count <= max_query_rows
            keys, values = (by_head(cache, table[b], kv_len) for cache in (k_cache, v_cache))
            queries = q[begin:end].double().numpy().reshape(count, num_kv_heads, group, head_dim).swapaxes(0, 1)
            scores = queries.reshape(num_kv_heads, count * group, head_dim) @ keys.swapaxes(1, 2)
            scores = scores.reshape(num_kv_heads, count, group, kv_len) * scale
            if count > 1 or window:
                limits, places = np.arange(kv_len - count, kv_len)[:, None], np.arange(kv_len)
                seen = places <= (limits if is_causal else np.full_like(limits, kv_len))
                if window == BUT_FIRST:
                    seen[:, :1] &= limits == 0
                elif window:
                    seen &= places > limits - window
                scores = np.where(seen[:, None], scores, -np.inf)
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            if sinks is not None:
                total += np.exp(sinks.double().numpy().reshape(num_kv_heads, 1, group, 1) - top)
            weights /= total
            sums = weights.reshape(num_kv_heads, count * group, kv_len) @ values
            sums = sums.reshape(num_kv_heads, count, group, head_dim).swapaxes(0, 1).reshape(count, num_heads, head_dim)
            out[begin:end] = torch.from_numpy(sums)
