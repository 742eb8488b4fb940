"""The ops of a GPU engine: the kernels of plugins/cuda, torch's norms and, unless deterministic, torch's GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from faser_trtllm.engine.gpu.fp8 import scaled_product
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
from faser_trtllm.ops.cuda.append_kv import QkvNorm, Rope
from faser_trtllm.ops.cuda.driver import Launcher, OnStream, StreamLauncher
from faser_trtllm.ops.cuda.experts import clamped_swiglu, combine_rows, grouped_matmul, route_rows
from faser_trtllm.ops.cuda.experts.grouped_matmul import Mxfp4Matrices
from faser_trtllm.ops.cuda.experts.route_rows import Choice, Routes
from faser_trtllm.ops.cuda.launch_cache import LaunchCache
from faser_trtllm.ops.cuda.products import matmul
from faser_trtllm.ops.cuda.quantize_rows import ScaledRows
from faser_trtllm.ops.cuda.tensors import PagedKv
from faser_trtllm.ops.cuda.verify_attention import AttentionLaunch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STEMS = (
    "accept",
    "append_kv",
    "clamped_swiglu",
    "combine_rows",
    "compact_rows",
    "copy_kv",
    "early_exit",
    "gated_silu",
    "grouped_matmul",
    "matmul",
    "prune_rows",
    "quantize_rows",
    "route_rows",
    "sample",
    "take_step",
    "verify_attention",
)

GROUPED_MM_MAJORS = (9, 10)
"""Major compute capabilities on which torch's grouped products do not wait for the host."""

P = ParamSpec("P")


class Ops:
    """Ops are asynchronous on the current stream and write to the given tensors, unless noted.

    launchers: by stem (STEMS), cubins on a GPU and an emulator in tests, for the ops that the engine uses; products of
    experts are torch's without "grouped_matmul". stream: returns the current stream as a number. num_sms: SMs of the
    device, for splitting long contexts; a partition gets more splits than it needs. torch allocates workspaces, so a
    captured graph owns its own. deterministic: a row's bits do not depend on the other rows of its pass, except in
    products in e4m3.
    """

    def __init__(
        self,
        launchers: Mapping[str, StreamLauncher],
        stream: Callable[[], int],
        num_sms: int,
        deterministic: bool = False,
    ) -> None:
        self._launchers = {stem: OnStream(launcher, stream) for stem, launcher in launchers.items()}
        self._num_sms, self.is_deterministic = num_sms, deterministic
        self._cache = LaunchCache()
        self._attention: dict[Hashable, AttentionLaunch] = {}
        # The launches of ops/cuda, with their signatures but without the launcher.
        self.accept = self._launched("accept", accept.accept)
        self.compact_rows = self._launched("compact_rows", compact_rows.compact_rows)
        self.copy_kv = self._launched("copy_kv", copy_kv.copy_kv)
        self.prune_rows = self._launched("prune_rows", prune_rows.prune_rows)
        self.sample = self._launched("sample", sample.sample)
        self.advance = self._launched("sample", sample.advance)
        self.take_step = self._launched("take_step", take_step.take_step)

    def linear(self, x: Tensor, weight: Tensor | ScaledRows, scaled: ScaledRows | None = None) -> Tensor:
        """Return x [n, in] times weight [out, in], new [n, out]; in e4m3 if the weight is. scaled: x in e4m3, if known.

        The result has x's dtype, except fp32 for fp16, which rows that are not normalized yet could overflow.
        """
        import torch

        if isinstance(weight, ScaledRows):
            return self.scaled_linear(x if scaled is None else scaled, weight, None)
        if self.is_deterministic:
            kind = torch.float32 if x.dtype is torch.float16 else x.dtype
            out = torch.empty((x.shape[0], weight.shape[0]), dtype=kind, device=x.device)
            self._matmul(x, weight, out)
            return out
        if x.dtype is not torch.float16:
            return torch.mm(x, weight.t())
        wide = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
        self.logits(x, weight, wide)
        return wide

    def add_linear(
        self, hidden: Tensor, x: Tensor | ScaledRows, weight: Tensor | ScaledRows, bias: Tensor | None
    ) -> ScaledRows | None:
        """Compute hidden [n, out] += x [n, in] times weight [out, in], plus bias [out]; in e4m3 if the weight is.
        Return the new hidden in e4m3 if that needs no extra launch."""
        if isinstance(weight, ScaledRows):
            return self.add_scaled(hidden, self.scaled_linear(x, weight, bias))
        assert not isinstance(x, ScaledRows), "rows in e4m3 need such a weight"
        if self.is_deterministic:
            self._matmul(x, weight, hidden, hidden, bias)
            return None
        hidden.addmm_(x, weight.t())
        if bias is not None:
            hidden += bias
        return None

    def scaled_linear(self, x: Tensor | ScaledRows, weight: ScaledRows, bias: Tensor | None) -> Tensor:
        """Return linear() in e4m3, plus bias [out]."""
        return scaled_product(x if isinstance(x, ScaledRows) else self.scaled_rows(x), weight, bias)

    def scaled_rows(self, x: Tensor) -> ScaledRows:
        """Return x in e4m3 (ops/cuda/quantize_rows.py), new."""
        rows = _empty_rows(x.shape[0], x.shape[1], x.device)
        self._cache.launch(
            ("quantize_rows", x.dtype, x.shape),
            (x, rows.values, rows.scales),
            self._launchers["quantize_rows"],
            lambda to: quantize_rows.launch(to, x, rows),
        )
        return rows

    def add_scaled(self, hidden: Tensor, product: Tensor) -> ScaledRows | None:
        """Compute hidden += product; return the new hidden in e4m3."""
        rows = _empty_rows(hidden.shape[0], hidden.shape[1], hidden.device)
        self._cache.launch(
            ("add_quantize_rows", product.dtype, product.shape),
            (product, hidden, rows.values, rows.scales),
            self._launchers["quantize_rows"],
            lambda to: quantize_rows.launch_add(to, product, hidden, rows),
        )
        return rows

    def logits(self, x: Tensor, lm_head: Tensor, out: Tensor) -> None:
        """Write x [n, hidden] times lm_head [vocab, hidden] to `out` fp32 [n, vocab]."""
        import torch

        if self.is_deterministic:
            self._matmul(x, lm_head, out)
        elif x.is_cuda:
            torch.mm(x, lm_head.t(), out_dtype=torch.float32, out=out)
        else:
            torch.mm(x.float(), lm_head.float().t(), out=out)

    def _matmul(
        self, x: Tensor, weight: Tensor, out: Tensor, addend: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        """Write x times weight, plus addend and bias, to `out`; addend may be out."""
        self._cache.launch(
            ("matmul", x.dtype, out.dtype, x.shape, weight.shape, addend is None, bias is None),
            (x, weight, addend, bias, out),
            self._launchers["matmul"],
            lambda to: matmul.launch(to, x, weight, out, addend, bias),
        )

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Return RMSNorm of x over the last dimension, new, of x's shape and dtype. weight: None for ones."""
        import torch

        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def gated_silu(self, gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return ops/cuda/gated_silu.py's result [n, inner], new, of hidden's dtype."""
        import torch

        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=hidden.dtype, device=hidden.device)
        self._cache.launch(
            ("gated_silu", hidden.dtype, gate_up.shape, hidden.shape, bias is None, eps),
            (gate_up, hidden, bias, out),
            self._launchers["gated_silu"],
            lambda to: gated_silu.launch(to, gate_up, hidden, bias, eps, out),
        )
        return out

    def scaled_silu(self, gate_up: Tensor, hidden: Tensor, bias: Tensor | None, eps: float) -> Tensor | ScaledRows:
        """Return gated_silu(), in e4m3 if one launch can do both."""
        num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        if inner > gated_silu.MAX_SCALED_COLUMNS:
            return self.gated_silu(gate_up, hidden, bias, eps)
        rows = _empty_rows(num_rows, inner, hidden.device)
        self._cache.launch(
            ("scaled_silu", gate_up.shape, hidden.shape, bias is None, eps),
            (gate_up, hidden, bias, rows.values, rows.scales),
            self._launchers["gated_silu"],
            lambda to: gated_silu.launch_scaled(to, gate_up, hidden, bias, eps, rows),
        )
        return rows

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
        tensors = (x, router, bias, num_used, *(getattr(routes, name) for name in routes.__slots__))
        self._cache.launch(
            ("route_rows", x.shape, router.shape, bias is None, choice, is_first),
            tensors,
            self._launchers["route_rows"],
            lambda to: route_rows.launch(to, x, router, bias, num_used, choice, is_first, routes),
        )

    def clamped_swiglu(self, gate_up: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        """Return ops/cuda/experts/clamped_swiglu.py's result [num_pairs, inner], new."""
        import torch

        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
        self._cache.launch(
            ("clamped_swiglu", gate_up.shape, bias.shape),
            (gate_up, bias, ends, out),
            self._launchers["clamped_swiglu"],
            lambda to: clamped_swiglu.launch(to, gate_up, bias, ends, out),
        )
        return out

    def grouped_linear(self, x: Tensor, weights: Tensor | Mxfp4Matrices, ends: Tensor) -> Tensor:
        """Return x [n, in] times its group's matrix of weights [num_groups, out, in], new [n, out]. Group g ends at row
        ends[g], int32. Rows after the last group are not written."""
        import torch

        matrices = (weights.blocks, weights.scales) if isinstance(weights, Mxfp4Matrices) else (weights,)
        if launcher := self._launchers.get("grouped_matmul"):
            out = torch.empty((x.shape[0], weights.shape[1]), dtype=x.dtype, device=x.device)
            self._cache.launch(
                ("grouped_matmul", x.shape, weights.shape, len(matrices)),
                (x, *matrices, ends, out),
                launcher,
                lambda to: grouped_matmul.launch(to, x, weights, ends, out),
            )
            return out
        assert not isinstance(weights, Mxfp4Matrices), "torch has no products in MXFP4"
        return torch.nn.functional.grouped_mm(x, weights.transpose(1, 2), offs=ends)

    def combine_rows(
        self,
        outputs: Tensor,
        routes: Routes,
        bias: Tensor | None,
        shared: Tensor | None,
        num_used: Tensor,
        hidden: Tensor,
    ) -> None:
        sizes = (outputs.shape, hidden.shape, routes.logits.shape, routes.ends.shape)
        self._cache.launch(
            ("combine_rows", *sizes, bias is None, shared is None),
            (outputs, routes.weights, routes.places, routes.experts, bias, shared, routes.logits, num_used, hidden),
            self._launchers["combine_rows"],
            lambda to: combine_rows.launch(to, outputs, routes, bias, shared, num_used, hidden),
        )

    def append_kv(
        self,
        qkv: Tensor,
        rope: Rope,
        kv: PagedKv,
        q_rotated: Tensor,
        norm: QkvNorm | None,
        first_branch: Tensor | None = None,
    ) -> None:
        caches, cos = kv.k_cache, rope.cos
        sizes = (q_rotated.dtype, caches.dtype, q_rotated.shape, caches.shape, kv.block_table.shape, cos.shape)
        key: tuple[Hashable, ...] = ("append_kv", *sizes, first_branch is None)
        tensors: tuple[Tensor | None, ...] = (qkv, *rope, *kv, q_rotated, first_branch)
        if norm is not None:
            weights = (norm.bias, norm.q_norm, norm.k_norm)
            key += (norm.hidden.shape, norm.eps, *[each is None for each in weights])
            tensors += (norm.hidden, *weights)
        self._cache.launch(
            key,
            tensors,
            self._launchers["append_kv"],
            lambda to: append_kv.launch(to, qkv, rope, kv, q_rotated, norm=norm, first_branch=first_branch),
        )

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
        """See ops/cuda/verify_attention.py. max_query_rows, max_kv_len: host-side bounds over the requests."""
        import torch

        cache = kv.k_cache
        sizes = (q.dtype, cache.dtype, q.shape, cache.shape, kv.block_table.shape)
        key = ("verify_attention", *sizes, window, max_query_rows, max_kv_len, is_causal, sinks is None)
        how = self._attention.get(key)
        if how is None:
            shape = verify_attention.shape_of(q, kv, window, is_causal, sinks)
            bounds = max_query_rows, max_kv_len
            how = AttentionLaunch.choose(shape, *bounds, self._num_sms, self.is_deterministic)
            self._attention[key] = how
        num_floats = how.workspace_bytes // 4
        workspace = torch.empty(num_floats, dtype=torch.float32, device=q.device) if num_floats else None
        self._cache.launch(
            key,
            (q, *kv, out, workspace, sinks),
            self._launchers["verify_attention"],
            lambda to: verify_attention.launch(
                to,
                q,
                kv,
                out,
                window=window,
                is_causal=is_causal,
                tile_rows=how.tile_rows,
                split_tokens=how.split_tokens,
                max_slots=how.max_slots,
                num_sms=self._num_sms,
                workspace=workspace,
                in_place=how.in_place,
                sinks=sinks,
            ),
        )

    def early_exit(
        self, hidden: Tensor, rows: Tensor, norm: Tensor, lm_head: Tensor, candidates: Tensor, eps: float, out: Tensor
    ) -> None:
        """Write only the scores of ops/cuda/early_exit.py to `out` fp32 [num_rows, num_candidates]."""
        import torch

        num_rows = rows.shape[0]
        integers = torch.zeros((2, num_rows), dtype=torch.int32, device=hidden.device)
        gap = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
        inputs, outputs = (hidden, rows, norm, lm_head, candidates, integers[0]), (out, integers[1], gap)
        early_exit.early_exit(self._launchers["early_exit"], *inputs, eps, *outputs)

    def _launched(self, stem: str, op: Callable[Concatenate[Launcher, P], None]) -> Callable[P, None]:
        launchers = self._launchers

        def launch(*arguments: P.args, **options: P.kwargs) -> None:
            op(launchers[stem], *arguments, **options)

        return launch


def _empty_rows(num_rows: int, width: int, device: torch.device) -> ScaledRows:
    import torch

    return ScaledRows(
        torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=device),
        torch.empty((num_rows, 1), dtype=torch.float32, device=device),
    )
