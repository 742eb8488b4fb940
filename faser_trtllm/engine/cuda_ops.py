"""What the cuda engine computes with: torch's GEMMs and norms, and the kernels of plugins/cuda or their references."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from faser_trtllm.engine.cuda_fp8 import scaled_linear_reference, scaled_product
from faser_trtllm.native import FAILED
from faser_trtllm.ops import accept as host_accept
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.arrays import SAMPLING_DTYPE
from faser_trtllm.ops.cuda import accept, append_kv, compact_rows, early_exit, quantize_rows, verify_attention
from faser_trtllm.ops.cuda.accept import ROW_REFUSED
from faser_trtllm.ops.cuda.compact_rows import CompactedRows
from faser_trtllm.ops.cuda.module import Launcher
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows

if TYPE_CHECKING:
    from torch import Tensor

STEMS = ("accept", "append_kv", "compact_rows", "early_exit", "quantize_rows", "verify_attention")


class Ops(Protocol):
    """Everything is asynchronous on the current stream, and writes to tensors it is given, unless it says otherwise."""

    def linear(self, x: Tensor, weight: Tensor | ScaledRows, bias: Tensor | None) -> Tensor:
        """x [n, in] times weight [out, in], plus bias [out] -> [n, out] of x's dtype, new; in e4m3 if the weight is."""

    def logits(self, x: Tensor, lm_head: Tensor, out: Tensor) -> None:
        """x [n, hidden] times lm_head [vocab, hidden] -> out fp32 [n, vocab]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension -> of x's shape and dtype, new."""

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """gate_up [n, 2 * inner] -> silu(gate) * up [n, inner], new."""

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
    ) -> None:
        """ops/cuda/append_kv.py."""

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
        """ops/cuda/verify_attention.py. max_query_rows, max_kv_len: the host's bounds over the requests."""

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
        leads: Tensor | None = None,
    ) -> None:
        """ops/cuda/accept.py."""


class _TorchOps:
    def linear(self, x: Tensor, weight: Tensor | ScaledRows, bias: Tensor | None) -> Tensor:
        import torch

        if isinstance(weight, ScaledRows):
            return self.scaled_linear(x, weight, bias)
        return torch.nn.functional.linear(x, weight, bias)

    def scaled_linear(self, x: Tensor, weight: ScaledRows, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        import torch

        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        import torch

        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate).mul_(up)


class KernelOps(_TorchOps):
    """The kernels, through one launcher per stem (STEMS): cubins on a GPU, an emulator in tests.

    stream: gives the current stream as a number. num_sms: of the device, to split long contexts by; a partition of it
    then has more splits than it needs. Workspaces are allocated by torch, so inside a graph they are the graph's.
    """

    def __init__(self, launchers: dict[str, Launcher], stream: Callable[[], int], num_sms: int) -> None:
        self._launchers = launchers
        self._stream = stream
        self._num_sms = num_sms

    def scaled_linear(self, x: Tensor, weight: ScaledRows, bias: Tensor | None) -> Tensor:
        return scaled_product(self.scaled_rows(x), weight, bias)

    def scaled_rows(self, x: Tensor) -> ScaledRows:
        """ops/cuda/quantize_rows.py."""
        import torch

        rows = ScaledRows(
            torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
            torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device),
        )
        quantize_rows.launch(self._launchers["quantize_rows"], x, rows, stream=self._stream())
        return rows

    def logits(self, x: Tensor, lm_head: Tensor, out: Tensor) -> None:
        import torch

        if x.is_cuda:
            torch.mm(x, lm_head.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), lm_head.float().t(), out=out)

    def append_kv(self, *tensors: Tensor) -> None:
        append_kv.launch(self._launchers["append_kv"], *tensors, stream=self._stream())

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
        import torch

        shape = verify_attention.shape_of(q, k_cache, v_cache, block_table, cu_q_lens, kv_lens, window)
        tile_rows = verify_attention.choose_tile_rows(shape, max_query_rows)
        num_splits = verify_attention.choose_num_splits(shape, tile_rows, max_kv_len, self._num_sms)
        needed = verify_attention.workspace_bytes(shape, num_splits)
        workspace = torch.empty(needed // 4, dtype=torch.float32, device=q.device) if needed else None
        verify_attention.launch(
            self._launchers["verify_attention"],
            q,
            k_cache,
            v_cache,
            block_table,
            cu_q_lens,
            kv_lens,
            out,
            window=window,
            tile_rows=tile_rows,
            num_splits=num_splits,
            workspace=workspace,
            stream=self._stream(),
        )

    def early_exit(
        self, hidden: Tensor, rows: Tensor, norm: Tensor, lm_head: Tensor, candidates: Tensor, eps: float, out: Tensor
    ) -> None:
        import torch

        num_rows = rows.shape[0]
        integers = torch.zeros((2, num_rows), dtype=torch.int32, device=hidden.device)
        early_exit.early_exit(
            self._launchers["early_exit"],
            hidden,
            rows,
            norm,
            lm_head,
            candidates,
            integers[0],
            eps,
            scores=out,
            rank=integers[1],
            gap=torch.empty(num_rows, dtype=torch.float32, device=hidden.device),
            stream=self._stream(),
        )

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
        compact_rows.compact_rows(
            self._launchers["compact_rows"],
            hidden,
            positions,
            rows,
            cu_q_lens,
            kv_lens,
            max_seq_len,
            kept=kept,
            stream=self._stream(),
        )

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
        leads: Tensor | None = None,
    ) -> None:
        accept.accept(
            self._launchers["accept"],
            sampling,
            slots,
            logits,
            vocab_size,
            cu_logit_rows,
            num_tokens,
            num_drafts,
            max_draft_len,
            result=result,
            verdicts=verdicts,
            edited_logits=edited_logits,
            leads=leads,
            stream=self._stream(),
        )


class ReferenceOps(_TorchOps):
    """The kernels' references on the CPU, and the native library's free test, over the same tensors."""

    def scaled_linear(self, x: Tensor, weight: ScaledRows, bias: Tensor | None) -> Tensor:
        return scaled_linear_reference(x, weight, bias)

    def logits(self, x: Tensor, lm_head: Tensor, out: Tensor) -> None:
        import torch

        torch.mm(x.float(), lm_head.float().t(), out=out)

    def append_kv(self, *tensors: Tensor) -> None:
        append_kv.append_kv_reference(*tensors)

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
        tensors = (q, k_cache, v_cache, block_table, cu_q_lens, kv_lens)
        out.copy_(verify_attention.verify_attention_reference(*tensors, window=window))

    def early_exit(
        self, hidden: Tensor, rows: Tensor, norm: Tensor, lm_head: Tensor, candidates: Tensor, eps: float, out: Tensor
    ) -> None:
        import torch

        places = np.zeros(rows.shape[0], np.int32)
        scores, _, _ = early_exit.early_exit_reference(
            hidden.float().numpy(),
            rows.numpy(),
            norm.float().numpy(),
            lm_head.float().numpy(),
            candidates.numpy(),
            places,
            eps,
        )
        out.copy_(torch.from_numpy(scores))

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
        import torch

        found = compact_rows.compact_rows_reference(
            hidden.float().numpy(), positions.numpy(), rows.numpy(), cu_q_lens.numpy(), kv_lens.numpy(), max_seq_len
        )
        for target, array in zip(kept, found, strict=True):
            target.copy_(torch.from_numpy(array))

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
        leads: Tensor | None = None,
    ) -> None:
        import torch

        table: Any = sampling.numpy().reshape(-1).view(SAMPLING_DTYPE).copy()
        n = slots.shape[0]
        # The kernels refuse an entry without tokens, as a bucket's idle requests have; the host's test would read them.
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
        if leads is None:
            found = host_accept.accept(*arguments)
        else:
            found = host_accept.accept_reference(*arguments, leads=leads.numpy())
        for name in ("token_ids", "num_tokens", "num_accepted", "outcome", "row_status"):
            getattr(result, name)[:n].copy_(torch.from_numpy(getattr(found, name)))
        refused = torch.from_numpy(is_idle[slots.numpy()])
        for values, value in ((result.num_tokens, 0), (result.outcome, FAILED), (result.row_status, ROW_REFUSED)):
            values[:n][refused] = value
