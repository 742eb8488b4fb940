"""The ops of a GPU engine on the CPU, with the kernels' references and the native rejection sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from faser_trtllm.core.decision import PruneRule
from faser_trtllm.engine.gpu.ops import Ops
from faser_trtllm.native import FAILED
from faser_trtllm.ops import accept as host_accept
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda.accept import ROW_REFUSED, Stages
from faser_trtllm.ops.cuda.append_kv import QkvNorm, Rope
from faser_trtllm.ops.cuda.compact_rows import CompactedRows
from faser_trtllm.ops.cuda.experts.grouped_matmul import Mxfp4Matrices
from faser_trtllm.ops.cuda.experts.route_rows import Choice, Routes
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from faser_trtllm.ops.cuda.tensors import PagedKv
from faser_trtllm.ops.probs import edited_logits as edit
from faser_trtllm.ops.prune_rows import PruneBatch, kept_rows, prune_rows_reference
from faser_trtllm.ops.transfer.pack_sampling import has_edits
from lab.reference.cuda.append_kv import append_kv_reference
from lab.reference.cuda.compact_rows import compact_rows_reference
from lab.reference.cuda.copy_kv import copy_kv_reference
from lab.reference.cuda.early_exit import early_exit_reference
from lab.reference.cuda.experts.clamped_swiglu import clamped_swiglu_reference
from lab.reference.cuda.experts.combine_rows import combine_rows_reference
from lab.reference.cuda.experts.grouped_matmul import decoded
from lab.reference.cuda.experts.route_rows import route_rows_reference
from lab.reference.cuda.gated_silu import gated_silu_reference
from lab.reference.cuda.products.scaled_linear import scaled_linear_reference
from lab.reference.cuda.sample import advance_reference, sample_reference
from lab.reference.cuda.take_step import take_step_reference
from lab.reference.cuda.verify_attention import verify_attention_reference

if TYPE_CHECKING:
    from torch import Tensor


class ReferenceOps(Ops):
    """Ops on the CPU with the kernels' references and the native library's rejection sampling."""

    def __init__(self) -> None:
        super().__init__({}, lambda: 0, 1)
        self.accept = _accept
        self.compact_rows = _compact_rows
        self.copy_kv = copy_kv_reference
        self.prune_rows = _prune_rows
        self.sample = sample_reference
        self.advance = advance_reference
        self.take_step = take_step_reference

    def scaled_linear(self, x: Tensor | ScaledRows, weight: ScaledRows, bias: Tensor | None) -> Tensor:
        assert not isinstance(x, ScaledRows), "the references quantize rows in each product"
        return scaled_linear_reference(x, weight, bias)

    def add_scaled(self, hidden: Tensor, product: Tensor) -> ScaledRows | None:
        hidden += product
        return None

    def gated_silu(self, gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        import torch

        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=hidden.dtype)
        gated_silu_reference(gate_up, hidden, bias, eps, out)
        return out

    def scaled_silu(self, gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float) -> Tensor | ScaledRows:
        return self.gated_silu(gate_up, hidden, bias, eps)

    def route_rows(
        self,
        x: Tensor,
        router: Tensor,
        bias: Tensor | None,
        num_used: Tensor,
        choice: Choice,
        is_first: bool,
        routes: Routes,
    ) -> None:
        route_rows_reference(x, router, bias, num_used, choice, is_first, routes)

    def grouped_linear(self, x: Tensor, weights: Tensor | Mxfp4Matrices, ends: Tensor) -> Tensor:
        return super().grouped_linear(x, decoded(weights) if isinstance(weights, Mxfp4Matrices) else weights, ends)

    def clamped_swiglu(self, gate_up: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        clamped_swiglu_reference(gate_up, bias, ends, out)
        return out

    def combine_rows(
        self,
        outputs: Tensor,
        routes: Routes,
        bias: Tensor | None,
        shared: Tensor | None,
        num_used: Tensor,
        hidden: Tensor,
    ) -> None:
        combine_rows_reference(outputs, routes, bias, shared, num_used, hidden)

    def append_kv(
        self,
        qkv: Tensor,
        rope: Rope,
        kv: PagedKv,
        q_rotated: Tensor,
        norm: QkvNorm | None,
        first_branch: Tensor | None = None,
    ) -> None:
        append_kv_reference(qkv, rope, kv, q_rotated, norm=norm, first_branch=first_branch)

    def verify_attention(
        self,
        q: Tensor,
        kv: PagedKv,
        out: Tensor,
        *,
        window: int,
        max_query_rows: int,
        max_kv_len: int,
        is_causal: bool = True,
        sinks: Tensor | None = None,
    ) -> None:
        out.copy_(verify_attention_reference(q, kv, window=window, is_causal=is_causal, sinks=sinks))

    def early_exit(
        self, hidden: Tensor, rows: Tensor, norm: Tensor, lm_head: Tensor, candidates: Tensor, eps: float, out: Tensor
    ) -> None:
        import torch

        weights = (norm.float().numpy(), lm_head.float().numpy())
        places = np.zeros(rows.shape[0], np.int32)
        inputs = (hidden.float().numpy(), rows.numpy(), *weights, candidates.numpy(), places)
        scores, _, _ = early_exit_reference(*inputs, eps)
        out.copy_(torch.from_numpy(scores))


def _compact_rows(
    hidden: Tensor,
    positions: Tensor,
    rows: Tensor,
    cu_q_lens: Tensor,
    kv_lens: Tensor,
    max_seq_len: int,
    kept: CompactedRows,
) -> None:
    import torch

    found = compact_rows_reference(
        hidden.float().numpy(), positions.numpy(), rows.numpy(), cu_q_lens.numpy(), kv_lens.numpy(), max_seq_len
    )
    for target, array in zip(kept, found, strict=True):
        target.copy_(torch.from_numpy(array))


def _prune_rows(
    scores: Tensor,
    places: Tensor,
    before: Tensor,
    cu_drafts: Tensor,
    starts: Tensor,
    rule: Tensor,
    num_hidden: int,
    kept: Tensor,
    rows: Tensor,
) -> None:
    import torch

    ranges = cu_drafts.numpy()
    weights = PruneRule(before.numpy(), *rule.tolist())
    batch = PruneBatch(starts.numpy(), np.diff(ranges) + 1, scores.numpy(), places.numpy(), num_hidden, weights)
    found = prune_rows_reference(scores.numpy(), batch)
    kept.copy_(torch.from_numpy(found))
    listed = kept_rows(batch, found)
    rows.fill_(-1)
    rows[: listed.size].copy_(torch.from_numpy(listed))


def _accept(
    sampling: Tensor,
    slots: Tensor,
    logits: Tensor,
    vocab_size: int,
    cu_logit_rows: Tensor,
    num_tokens: Tensor,
    num_drafts: Tensor,
    max_draft_len: int,
    result: AcceptResult,
    verdicts: Tensor,
    edited_logits: Tensor | None = None,
    workspace: Tensor | None = None,
    stages: Stages = Stages.ALL,
    part_entries: int = 0,
) -> None:
    import torch

    table: Any = sampling.numpy().reshape(-1).view(SAMPLING_DTYPE).copy()
    n = slots.shape[0]
    # The kernels refuse entries without tokens, such as a bucket's idle requests; the native code would read them.
    is_idle = table["tokens"] == 0
    table["tokens"][is_idle], table["repetition_penalty"][is_idle] = num_tokens.data_ptr(), 1.0
    arguments = (
        table,
        slots.numpy(),
        logits.numpy(),
        vocab_size,
        cu_logit_rows.numpy(),
        num_tokens.numpy(),
        num_drafts.numpy(),
        max_draft_len,
    )
    found = host_accept.accept(*arguments)
    if edited_logits is not None:
        starts, known = cu_logit_rows.tolist(), num_tokens.tolist()
        for i, slot in enumerate(slots.tolist()):
            for row in range(starts[i], starts[i + 1]):
                position = known[i] + row - starts[i]
                if has_edits(table[slot : slot + 1], np.array([position], np.int32))[0]:
                    _, edited = edit(table, slot, logits[row, :vocab_size].numpy(), position)
                    edited_logits[row].copy_(torch.from_numpy(edited))
    for name in ("token_ids", "num_tokens", "num_accepted", "outcome", "row_status"):
        getattr(result, name)[:n].copy_(torch.from_numpy(getattr(found, name)))
    refused = torch.from_numpy(is_idle[slots.numpy()])
    for values, value in ((result.num_tokens, 0), (result.outcome, FAILED), (result.row_status, ROW_REFUSED)):
        values[:n][refused] = value
