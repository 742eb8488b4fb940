"""The kernels of plugins/cuda as the ops of a GPU engine, and torch's GEMMs and norms."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.engine.gpu.fp8 import scaled_product
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.ops.cuda import (
    accept,
    append_kv,
    compact_rows,
    copy_kv,
    early_exit,
    gated_silu,
    prune_rows,
    quantize_rows,
    sample,
    take_step,
    verify_attention,
)
from faser_trtllm.ops.cuda.append_kv import QkvNorm
from faser_trtllm.ops.cuda.compact_rows import CompactedRows
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.launch_cache import LaunchCache
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from faser_trtllm.ops.cuda.sample import Draws, StopTables
from faser_trtllm.ops.cuda.take_step import StepInputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

from faser_trtllm.engine.gpu.ops import TorchOps

STEMS = (
    "accept",
    "append_kv",
    "compact_rows",
    "copy_kv",
    "early_exit",
    "gated_silu",
    "prune_rows",
    "quantize_rows",
    "sample",
    "take_step",
    "verify_attention",
)


@dataclass(frozen=True, slots=True)
class _AttentionLaunch:
    """As verify_attention.launch() takes it; num_floats: of the workspace."""

    tile_rows: int
    max_slots: int
    num_floats: int

    @classmethod
    def of(cls, shape: verify_attention.AttentionShape, max_query_rows: int, max_kv_len: int) -> _AttentionLaunch:
        max_slots = verify_attention.choose_max_slots(shape, max_kv_len)
        num_floats = verify_attention.workspace_bytes(shape, max_slots) // 4
        return cls(verify_attention.choose_tile_rows(shape, max_query_rows), max_slots, num_floats)


class KernelOps(TorchOps):
    """The kernels, through one launcher per stem (STEMS): cubins on a GPU, an emulator in tests.

    stream: returns the current stream as a number. num_sms: SMs of the device, for splitting long contexts; a partition
    then gets more splits than it needs. torch allocates workspaces, so a captured graph owns its own.
    """

    def __init__(self, launchers: dict[str, Launcher], stream: Callable[[], int], num_sms: int) -> None:
        self._launchers = launchers
        self._stream = stream
        self._num_sms = num_sms
        self._cache = LaunchCache()
        self._attention: dict[Hashable, _AttentionLaunch] = {}

    def scaled_linear(self, x: Tensor | ScaledRows, weight: ScaledRows, bias: Tensor | None) -> Tensor:
        return scaled_product(x if isinstance(x, ScaledRows) else self.scaled_rows(x), weight, bias)

    def scaled_rows(self, x: Tensor) -> ScaledRows:
        """ops/cuda/quantize_rows.py."""
        rows = _empty_rows(x.shape[0], x.shape[1], x.device)
        self._cache.launch(
            ("quantize_rows", x.dtype, x.shape),
            (x, rows.values, rows.scales),
            self._launchers["quantize_rows"],
            self._stream(),
            lambda to: quantize_rows.launch(to, x, rows),
        )
        return rows

    def add_scaled(self, hidden: Tensor, product: Tensor) -> ScaledRows | None:
        rows = _empty_rows(hidden.shape[0], hidden.shape[1], hidden.device)
        self._cache.launch(
            ("add_quantize_rows", product.dtype, product.shape),
            (product, hidden, rows.values, rows.scales),
            self._launchers["quantize_rows"],
            self._stream(),
            lambda to: quantize_rows.launch_add(to, product, hidden, rows),
        )
        return rows

    def gated_silu(self, gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        import torch

        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=hidden.dtype, device=hidden.device)
        self._cache.launch(
            ("gated_silu", hidden.dtype, gate_up.shape, hidden.shape, bias is None, eps),
            (gate_up, hidden, bias, out),
            self._launchers["gated_silu"],
            self._stream(),
            lambda to: gated_silu.launch(to, gate_up, hidden, bias, eps, out),
        )
        return out

    def scaled_silu(self, gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float) -> Tensor | ScaledRows:
        num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        if inner > gated_silu.MAX_SCALED_COLUMNS:
            return self.gated_silu(gate_up, hidden, bias, eps)
        rows = _empty_rows(num_rows, inner, hidden.device)
        self._cache.launch(
            ("scaled_silu", gate_up.shape, hidden.shape, bias is None, eps),
            (gate_up, hidden, bias, rows.values, rows.scales),
            self._launchers["gated_silu"],
            self._stream(),
            lambda to: gated_silu.launch_scaled(to, gate_up, hidden, bias, eps, rows),
        )
        return rows

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
        where = (cos, sin, positions, cu_q_lens, block_table, kv_lens)
        outputs = (q_rotated, k_cache, v_cache)
        sizes = (q_rotated.dtype, k_cache.dtype, q_rotated.shape, k_cache.shape, block_table.shape, cos.shape)
        key: tuple[Hashable, ...] = ("append_kv", *sizes, first_branch is None)
        tensors: tuple[Tensor | None, ...] = (qkv, *where, *outputs, first_branch)
        if norm is not None:
            weights = (norm.bias, norm.q_norm, norm.k_norm)
            key += (norm.hidden.shape, norm.eps, *[each is None for each in weights])
            tensors += (norm.hidden, *weights)
        self._cache.launch(
            key,
            tensors,
            self._launchers["append_kv"],
            self._stream(),
            lambda to: append_kv.launch(to, qkv, *where, *outputs, norm=norm, first_branch=first_branch),
        )

    def copy_kv(self, copies: Tensor, cache: Tensor) -> None:
        copy_kv.copy_kv(self._launchers["copy_kv"], copies, cache, stream=self._stream())

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

        inputs = (q, k_cache, v_cache, block_table, cu_q_lens, kv_lens)
        sizes = (q.dtype, k_cache.dtype, q.shape, k_cache.shape, block_table.shape)
        key = ("verify_attention", *sizes, window, max_query_rows, max_kv_len)
        how = self._attention.get(key)
        if how is None:
            shape = verify_attention.shape_of(*inputs, window)
            how = self._attention[key] = _AttentionLaunch.of(shape, max_query_rows, max_kv_len)
        workspace = torch.empty(how.num_floats, dtype=torch.float32, device=q.device) if how.num_floats else None
        self._cache.launch(
            key,
            (*inputs, out, workspace),
            self._launchers["verify_attention"],
            self._stream(),
            lambda to: verify_attention.launch(
                to,
                *inputs,
                out,
                window=window,
                tile_rows=how.tile_rows,
                max_slots=how.max_slots,
                num_sms=self._num_sms,
                workspace=workspace,
            ),
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
        prune_rows.prune_rows(
            self._launchers["prune_rows"],
            scores,
            places,
            before,
            cu_drafts,
            starts,
            rule,
            num_hidden,
            kept=kept,
            rows=rows,
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
            stream=self._stream(),
        )

    def sample(self, draws: Draws, logits: Tensor, num_requests: int, edited_logits: Tensor | None) -> None:
        sample.sample(self._launchers["sample"], draws, logits, num_requests, edited_logits, stream=self._stream())

    def advance(self, draws: Draws, stop: StopTables, num_requests: int, *, has_history: bool) -> None:
        launcher = self._launchers["sample"]
        sample.advance(launcher, draws, stop, num_requests, has_history=has_history, stream=self._stream())

    def take_step(
        self, newest: Tensor, known: Tensor, remaining: Tensor, block_table: Tensor, inputs: StepInputs
    ) -> None:
        launcher = self._launchers["take_step"]
        take_step.take_step(launcher, newest, known, remaining, block_table, inputs, stream=self._stream())


def _empty_rows(num_rows: int, width: int, device: torch.device) -> ScaledRows:
    import torch

    return ScaledRows(
        torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=device),
        torch.empty((num_rows, 1), dtype=torch.float32, device=device),
    )
