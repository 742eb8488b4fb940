"""The functions of plugins in an interpreted plan: the kernels, emulated, launched as the ops of an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from faser_trtllm.builder.network.layers import Layer
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.ops.cuda import verify_attention
from faser_trtllm.ops.cuda.append_kv import Rope
from faser_trtllm.ops.cuda.compact_rows import CompactedRows
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import PagedKv, type_name
from lab.interpreted.layers import Operation
from tests.ops.cuda.emulation import EmulatedModule
from tests.support.plugin_stand_in import REFERENCES

_STEMS = ("append_kv", "compact_rows", "early_exit", "prune_rows")


@functools.cache
def functions(head_dim: int) -> dict[str, Callable[..., Any]]:
    """Return the functions by the plugins' names. Those that take no float32 are references for it."""
    launchers: dict[str, Any] = {stem: EmulatedModule(stem) for stem in _STEMS}
    if head_dim % 16 == 0 and head_dim >= 64:
        launchers["verify_attention"] = EmulatedModule("verify_attention", {"FASER_HEAD_DIM": head_dim})
    ops = Ops(launchers, lambda: 0, num_sms=1)
    kernels = {name: functools.partial(kernel, ops) for name, kernel in _KERNELS.items()}
    for name, kernel in (("verify_attention", _attend), ("verify_attention_combine", _combine)):
        kernels[name] = functools.partial(kernel, launchers.get("verify_attention"))

    def choose(name: str) -> Callable[..., Any]:
        if name not in _HALF_ONLY:
            return kernels[name]
        return lambda first, *rest, **options: (REFERENCES[name] if first.dtype is torch.float32 else kernels[name])(
            first, *rest, **options
        )

    return {name: choose(name) for name in REFERENCES}


def matrix_multiply(layer: Layer, dtype: torch.dtype, constants: Any) -> Operation:
    """In place of the interpreter's: sums in float64."""
    first, second = (layer.parameters[name] == "TRANSPOSE" for name in ("op0", "op1"))

    def run(a: Tensor, b: Tensor) -> Tensor:
        a, b = a.double(), b.double()
        return ((a.mT if first else a) @ (b.mT if second else b)).to(dtype)

    return run


def _append_kv(ops: Ops, qkv: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin, positions, cu_q_lens, block_table, kv_lens, k_cache, v_cache = inputs
    num_heads = qkv.view(qkv.shape[0], -1, k_cache.shape[3]).shape[1] - 2 * k_cache.shape[1]
    q = torch.zeros((qkv.shape[0], num_heads, k_cache.shape[3]), dtype=qkv.dtype)
    kv = PagedKv(k_cache, v_cache, block_table, cu_q_lens, kv_lens)
    ops.append_kv(qkv, Rope(cos, sin, positions), kv, q, None)
    return q, k_cache, v_cache


def _attend(launcher: Launcher, q: Tensor, *inputs: Tensor, split_tokens: int) -> tuple[Tensor, Tensor]:
    kv = PagedKv(*inputs)
    shape = verify_attention.shape_of(q, kv)
    longest = shape.max_blocks_per_seq * shape.tokens_per_block
    max_slots = verify_attention.choose_max_slots(shape, longest, split_tokens) if split_tokens else 0
    out, workspace = torch.zeros_like(q), torch.zeros(max(1, verify_attention.workspace_bytes(shape, max_slots) // 4))
    # One tile for all passes, as a plan has it: the tiles differ in the last bit.
    options = {"tile_rows": 16, "split_tokens": split_tokens or 64, "max_slots": max_slots, "num_sms": 1}
    verify_attention.launch(launcher, q, kv, out, **options, workspace=workspace, combine=False)
    return out, workspace


def _combine(
    launcher: Launcher,
    whole: Tensor,
    workspace: Tensor,
    cu_q_lens: Tensor,
    kv_lens: Tensor,
    *,
    num_kv_heads: int,
    tokens_per_block: int,
    max_blocks_per_seq: int,
    split_tokens: int,
) -> tuple[Tensor]:
    num_rows, num_heads, head_dim = whole.shape
    dtype = type_name("whole", whole)
    cache = (num_kv_heads, head_dim, 0, tokens_per_block, max_blocks_per_seq)
    shape = verify_attention.AttentionShape(num_rows, kv_lens.shape[0], num_heads, *cache, dtype, dtype)
    max_slots = workspace.numel() // (num_heads * (head_dim + 2))
    out = torch.zeros_like(whole)
    verify_attention.launch_combine(launcher, shape, whole, workspace, cu_q_lens, kv_lens, out, split_tokens, max_slots)
    return (out,)


def _early_exit(
    ops: Ops, hidden: Tensor, rows: Tensor, norm: Tensor, head: Tensor, candidates: Tensor, places: Tensor,
    rms_norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores = torch.empty(candidates.shape, dtype=torch.float32)
    ops.early_exit(hidden, rows, norm, head, candidates, rms_norm_eps, scores)
    return scores, torch.zeros_like(rows), torch.zeros(rows.shape)  # nothing reads the rank and the gap


def _prune_rows(
    ops: Ops, scores: Tensor, places: Tensor, before: Tensor, cu_drafts: Tensor, starts: Tensor, rule: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kept, rows = torch.empty_like(starts), torch.empty_like(positions)
    ops.prune_rows(scores, places, before, cu_drafts, starts, rule, positions.shape[0], kept, rows)
    return kept, rows


def _compact_rows(
    ops: Ops,
    hidden: Tensor,
    positions: Tensor,
    rows: Tensor,
    cu_q_lens: Tensor,
    kv_lens: Tensor,
    max_seq_len: int,
) -> tuple[Tensor, ...]:
    kept = CompactedRows(
        torch.empty((rows.shape[0], hidden.shape[1]), dtype=hidden.dtype),
        *(torch.empty_like(tensor) for tensor in (rows, rows, cu_q_lens, kv_lens)),
    )
    ops.compact_rows(hidden, positions, rows, cu_q_lens, kv_lens, max_seq_len, kept)
    return kept.hidden, kept.positions, kept.request_ids, kept.cu_q_lens, kept.kv_lens


_HALF_ONLY = ("append_kv", "verify_attention", "verify_attention_combine", "early_exit")
_KERNELS: dict[str, Callable[..., Any]] = {
    "append_kv": _append_kv,
    "early_exit": _early_exit,
    "prune_rows": _prune_rows,
    "compact_rows": _compact_rows,
}
