"""What a GPU engine computes with, and the part of it that is torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.cuda.append_kv import QkvNorm
from faser_trtllm.ops.cuda.compact_rows import CompactedRows
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from faser_trtllm.ops.cuda.sample import Draws, StopTables
from faser_trtllm.ops.cuda.take_step import StepInputs

if TYPE_CHECKING:
    from torch import Tensor


class Ops(Protocol):
    """Ops are asynchronous on the current stream and write to the given tensors, unless noted."""

    def linear(self, x: Tensor, weight: Tensor | ScaledRows, scaled: ScaledRows | None = None) -> Tensor:
        """x [n, in] times weight [out, in] -> [n, out], new; in e4m3 if the weight is. Rows may not be normalised yet:
        of x's dtype, but fp32 where that is fp16, whose range they could leave. scaled: x in e4m3, if it is known."""

    def add_linear(
        self, hidden: Tensor, x: Tensor | ScaledRows, weight: Tensor | ScaledRows, bias: Tensor | None
    ) -> ScaledRows | None:
        """hidden [n, out] += x [n, in] times weight [out, in], plus bias [out]; in e4m3 if the weight is. Returns the
        new hidden in e4m3 where that takes no launch of its own."""

    def logits(self, x: Tensor, lm_head: Tensor, out: Tensor) -> None:
        """x [n, hidden] times lm_head [vocab, hidden] -> out fp32 [n, vocab]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension -> of x's shape and dtype, new."""

    def gated_silu(self, gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """ops/cuda/gated_silu.py -> [n, inner] of hidden's dtype, new."""

    def scaled_silu(self, gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float) -> Tensor | ScaledRows:
        """gated_silu() in e4m3 where that takes no launch of its own."""

    def append_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        cu_q_lens: Tensor,
        block_table: Tensor,
        kv_lens: Tensor,
        q_rotated: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        norm: QkvNorm | None,
        first_branch: Tensor | None = None,
    ) -> None:
        """ops/cuda/append_kv.py."""

    def copy_kv(self, copies: Tensor, cache: Tensor) -> None:
        """ops/cuda/copy_kv.py."""

    def verify_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        cu_q_lens: Tensor,
        kv_lens: Tensor,
        out: Tensor,
        *,
        window: int,
        max_query_rows: int,
        max_kv_len: int,
    ) -> None:
        """ops/cuda/verify_attention.py. max_query_rows, max_kv_len: host-side bounds over the requests."""

    def early_exit(
        self, hidden: Tensor, rows: Tensor, norm: Tensor, lm_head: Tensor, candidates: Tensor, eps: float, out: Tensor
    ) -> None:
        """ops/cuda/early_exit.py, the scores alone -> out fp32 [num_rows, num_candidates]."""

    def compact_rows(
        self,
        hidden: Tensor,
        positions: Tensor,
        rows: Tensor,
        cu_q_lens: Tensor,
        kv_lens: Tensor,
        max_seq_len: int,
        kept: CompactedRows,
    ) -> None:
        """ops/cuda/compact_rows.py."""

    def prune_rows(
        self,
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
        """ops/cuda/prune_rows.py."""

    def accept(
        self,
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
        edited_logits: Tensor | None,
    ) -> None:
        """ops/cuda/accept.py."""

    def sample(self, draws: Draws, logits: Tensor, num_requests: int, edited_logits: Tensor | None) -> None:
        """ops/cuda/sample.py."""

    def advance(self, draws: Draws, stop: StopTables, num_requests: int, *, has_history: bool) -> None:
        """ops/cuda/sample.py."""

    def take_step(
        self, newest: Tensor, known: Tensor, remaining: Tensor, block_table: Tensor, inputs: StepInputs
    ) -> None:
        """ops/cuda/take_step.py."""


class TorchOps:
    def linear(self, x: Tensor, weight: Tensor | ScaledRows, scaled: ScaledRows | None = None) -> Tensor:
        import torch

        if isinstance(weight, ScaledRows):
            return self.scaled_linear(x if scaled is None else scaled, weight, None)
        if x.dtype is not torch.float16:
            return torch.mm(x, weight.t())
        wide = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
        self.logits(x, weight, wide)
        return wide

    def add_linear(
        self, hidden: Tensor, x: Tensor | ScaledRows, weight: Tensor | ScaledRows, bias: Tensor | None
    ) -> ScaledRows | None:
        if isinstance(weight, ScaledRows):
            return self.add_scaled(hidden, self.scaled_linear(x, weight, bias))
        assert not isinstance(x, ScaledRows), "rows in e4m3 need such a weight"
        hidden.addmm_(x, weight.t())
        if bias is not None:
            hidden += bias
        return None

    def add_scaled(self, hidden: Tensor, product: Tensor) -> ScaledRows | None:
        """hidden += product, as add_linear() says."""
        hidden += product
        return None

    def scaled_linear(self, x: Tensor | ScaledRows, weight: ScaledRows, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def gated_silu(self, gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        raise NotImplementedError

    def scaled_silu(self, gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float) -> Tensor | ScaledRows:
        return self.gated_silu(gate_up, hidden, bias, eps)

    def logits(self, x: Tensor, lm_head: Tensor, out: Tensor) -> None:
        import torch

        if x.is_cuda:
            torch.mm(x, lm_head.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), lm_head.float().t(), out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        import torch

        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
