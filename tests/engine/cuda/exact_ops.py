"""The cuda engine's ops in float64 over float32 memory: a row's result does not depend on what runs beside it.

Sums in float64 are in another order for another number of rows, but what is kept of them, a float32, is the same. So
speculation can be compared with no speculation bit for bit, which GEMMs in bf16 do not allow.
"""

from __future__ import annotations

import math

import torch

from faser_trtllm.engine.gpu.reference_ops import ReferenceOps
from faser_trtllm.ops.cuda.append_kv import branches_before, normed_qkv
from faser_trtllm.ops.cuda.gated_silu import gated_silu_reference
from faser_trtllm.ops.cuda.kv_cache import E4M3_MAX, kv_values
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from faser_trtllm.ops.cuda.verify_attention import BUT_FIRST


def stored(values, cache):
    """As a cache holds them: e4m3 saturates."""
    return (values.clamp(-E4M3_MAX, E4M3_MAX) if cache.dtype is torch.float8_e4m3fn else values).to(cache.dtype)


class ExactOps(ReferenceOps):
    def linear(self, x, weight, scaled=None):
        if isinstance(weight, ScaledRows):
            return super().linear(x, weight, scaled)
        return (x.double() @ weight.double().t()).to(x.dtype)

    def add_linear(self, hidden, x, weight, bias):
        if isinstance(weight, ScaledRows):
            return super().add_linear(hidden, x, weight, bias)
        sums = hidden.double() + x.double() @ weight.double().t()
        hidden.copy_(sums if bias is None else sums + bias.double())
        return None

    def logits(self, x, lm_head, out):
        out.copy_(x.double() @ lm_head.double().t())

    def rms_norm(self, x, weight, eps):
        y = x.double()
        return (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(x.dtype)

    def gated_silu(self, gate_up, hidden, bias, eps):
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=hidden.dtype)
        gated_silu_reference(gate_up.double(), hidden, bias, eps, out)
        return out

    def append_kv(
        self,
        qkv,
        cos,
        sin,
        positions,
        cu_q_lens,
        block_table,
        kv_lens,
        q_rotated,
        k_cache,
        v_cache,
        norm,
        first_branch=None,
    ):
        num_rows, num_heads, head_dim = q_rotated.shape
        num_blocks, num_kv_heads, tokens_per_block, _ = k_cache.shape
        values = qkv.double() if norm is None else normed_qkv(qkv.double(), num_heads, num_kv_heads, norm)
        heads = values.view(num_rows, -1, head_dim)
        angles = positions.long().clamp(0, cos.shape[0] - 1)
        c, s = cos[angles][:, None].double(), sin[angles][:, None].double()
        low, high = heads.chunk(2, -1)
        rotated = torch.cat((low * c - high * s, high * c + low * s), -1).to(q_rotated.dtype)
        q_rotated.copy_(rotated[:, :num_heads])
        offsets, lens = cu_q_lens.tolist(), kv_lens.tolist()
        for b, kv_len in enumerate(lens):
            for row in range(offsets[b], min(offsets[b + 1], num_rows)):
                position = int(positions[row])
                if position >= kv_len:
                    continue
                for owner in (b, *branches_before(first_branch, b, position, lens, tokens_per_block)):
                    block, offset = int(block_table[owner, position // tokens_per_block]), position % tokens_per_block
                    assert 0 <= block < num_blocks
                    k_cache[block, :, offset] = stored(rotated[row, num_heads : num_heads + num_kv_heads], k_cache)
                    v_cache[block, :, offset] = stored(heads[row, num_heads + num_kv_heads :], v_cache)

    def verify_attention(
        self, q, k_cache, v_cache, block_table, cu_q_lens, kv_lens, out, *, window, max_query_rows, max_kv_len
    ):
        num_rows, num_heads, head_dim = q.shape
        group = num_heads // k_cache.shape[1]
        out.zero_()
        offsets = cu_q_lens.tolist()
        assert max(kv_lens.tolist()) <= max_kv_len
        for b, kv_len in enumerate(kv_lens.tolist()):
            begin, end = offsets[b], min(offsets[b + 1], num_rows)
            if begin >= end or kv_len == 0:
                continue
            assert end - begin <= max_query_rows
            keys = kv_values(k_cache, block_table[b], kv_len, 1.0).double().repeat_interleave(group, 1)
            values = kv_values(v_cache, block_table[b], kv_len, 1.0).double().repeat_interleave(group, 1)
            limits = kv_len - (end - begin) + torch.arange(end - begin)
            places = torch.arange(kv_len)
            seen = places <= limits[:, None]
            if window == BUT_FIRST:
                seen[:, 0] &= limits == 0
            elif window:
                seen &= places > limits[:, None] - window
            scores = torch.einsum("rhd,phd->hrp", q[begin:end].double(), keys) / math.sqrt(head_dim)
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            out[begin:end] = torch.einsum("hrp,phd->rhd", weights, values).to(q.dtype)
