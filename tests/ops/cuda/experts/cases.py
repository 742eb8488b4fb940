"""Cases of the kernels of a mixture of experts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch

from faser_trtllm.ops.cuda.experts import clamped_swiglu, combine_rows, grouped_matmul, route_rows
from faser_trtllm.ops.cuda.experts.grouped_matmul import Mxfp4Matrices
from faser_trtllm.ops.cuda.experts.route_rows import Choice, Routes
from lab.reference.cuda.experts.clamped_swiglu import clamped_swiglu_reference
from lab.reference.cuda.experts.combine_rows import combine_rows_reference
from lab.reference.cuda.experts.grouped_matmul import grouped_matmul_reference
from lab.reference.cuda.experts.route_rows import route_rows_reference

UNWRITTEN = 77


@dataclasses.dataclass
class RouteCase:
    """Rows of which the first num_used are no dummies. x, router and bias are bf16."""

    x: torch.Tensor
    router: torch.Tensor
    num_used: int
    choice: Choice
    bias: torch.Tensor | None = None

    def run(self, launcher, device: str = "cpu", before: int | None = None) -> Routes:
        """Run the kernels, or the reference without a launcher. before: experts counted in layers before this one;
        None: it is the first."""
        routes = Routes.of(len(self.x), len(self.router), self.choice, torch.device(device))
        for name in routes.__slots__:
            getattr(routes, name).fill_(UNWRITTEN if name != "num_distinct" else before or UNWRITTEN)
        used = torch.tensor([self.num_used], dtype=torch.int32, device=device)
        bias = None if self.bias is None else self.bias.to(device)
        arguments = (self.x.to(device), self.router.to(device), bias, used, self.choice, before is None, routes)
        if launcher is None:
            route_rows_reference(*arguments)
        else:
            route_rows.launch(launcher, *arguments)
        return Routes(*(getattr(routes, name).cpu() for name in routes.__slots__))


def whole_case(
    num_rows: int,
    num_used: int,
    num_experts: int,
    top_k: int,
    width: int = 64,
    *,
    over_all=False,
    others=0,
    has_bias=False,
    seed=0,
) -> RouteCase:
    """Small whole numbers, whose sums are exact and often equal."""
    generator = torch.Generator().manual_seed(seed)
    num_outputs = num_experts + others
    x, router = (torch.randint(-1, 2, (n, width), generator=generator).bfloat16() for n in (num_rows, num_outputs))
    bias = torch.randint(-3, 4, (num_outputs,), generator=generator).bfloat16() if has_bias else None
    return RouteCase(x, router, num_used, Choice(num_experts, top_k, over_all), bias)


def random_case(num_rows: int, num_used: int, num_experts: int, top_k: int, width: int, *, others=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((num_rows, width), generator=generator).bfloat16()
    router = (2 * width**-0.5 * torch.randn((num_experts + others, width), generator=generator)).bfloat16()
    return RouteCase(x, router, num_used, Choice(num_experts, top_k, False))


def assert_same_routes(found: Routes, wanted: Routes) -> None:
    """Equal but for the roundings of the weights."""
    for name in routes_without_weights(found):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-7)


def routes_without_weights(routes: Routes) -> list[str]:
    return [name for name in routes.__slots__ if name != "weights"]


@dataclasses.dataclass
class CombineCase:
    """outputs of the pairs of a RouteCase's routes, a shared expert's or None, and the residual."""

    routes: Routes
    outputs: torch.Tensor
    shared: torch.Tensor | None
    hidden: torch.Tensor
    num_used: int
    bias: torch.Tensor | None = None

    def run(self, launcher, device: str = "cpu") -> torch.Tensor:
        """Run as RouteCase.run does and check that memory after the last row is unchanged."""
        around = torch.full((len(self.hidden) + 1, self.hidden.shape[1]), 7.0, dtype=self.hidden.dtype, device=device)
        hidden = around[:-1]
        hidden.copy_(self.hidden)
        used = torch.tensor([self.num_used], dtype=torch.int32, device=device)
        routes = Routes(*(getattr(self.routes, name).to(device) for name in self.routes.__slots__))
        bias, shared = (None if each is None else each.to(device) for each in (self.bias, self.shared))
        arguments = (self.outputs.to(device), routes, bias, shared, used, hidden)
        if launcher is None:
            combine_rows_reference(*arguments)
        else:
            combine_rows.launch(launcher, *arguments)
        assert (around[-1] == 7).all()
        return hidden.cpu()


def combine_case(
    num_rows: int, num_used: int, top_k: int, width: int, *, has_shared=False, has_bias=False, seed=0
) -> CombineCase:
    """Outputs of pairs that do not exist are NaN."""
    generator = torch.Generator().manual_seed(seed)
    routes = whole_case(num_rows, num_used, 8, top_k, others=int(has_shared), seed=seed).run(None)
    outputs = torch.randn((num_rows * top_k, width), generator=generator).bfloat16()
    outputs[max(num_used, 0) * top_k :] = np.nan
    hidden, shared = torch.randn((2, num_rows, width), generator=generator).bfloat16()
    bias = torch.randn((8, width), generator=generator).bfloat16() if has_bias else None
    return CombineCase(routes, outputs, shared if has_shared else None, hidden.contiguous(), num_used, bias)


@dataclasses.dataclass
class SwigluCase:
    """Outputs of gate and up of pairs that are sorted by expert; some after the last expert's are dummies."""

    gate_up: torch.Tensor
    bias: torch.Tensor
    ends: torch.Tensor

    def run(self, launcher, device: str = "cpu") -> torch.Tensor:
        """Run the kernel, or the reference without a launcher, into memory full of UNWRITTEN; memory after it stays."""
        num_pairs, inner = self.gate_up.shape[0], self.gate_up.shape[1] // 2
        around = torch.full((num_pairs + 1, inner), float(UNWRITTEN), dtype=self.gate_up.dtype, device=device)
        arguments = (*(each.to(device) for each in (self.gate_up, self.bias, self.ends)), around[:-1])
        if launcher is None:
            clamped_swiglu_reference(*arguments)
        else:
            clamped_swiglu.launch(launcher, *arguments)
        assert (around[-1] == UNWRITTEN).all()
        return around[:-1].cpu()


def swiglu_case(counts: Sequence[int], num_dummies: int, inner: int, *, spread=4.0, seed=0) -> SwigluCase:
    """counts: pairs per expert. spread: of the values, of which those beyond 7 are clamped. Dummies are NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_pairs = sum(counts)
    gate_up = spread * torch.randn((num_pairs + num_dummies, 2 * inner), generator=generator)
    gate_up[num_pairs:] = np.nan
    bias = torch.randn((len(counts), 2 * inner), generator=generator)
    return SwigluCase(gate_up.bfloat16(), bias.bfloat16(), torch.tensor(counts).cumsum(0).to(torch.int32))


@dataclasses.dataclass
class GroupedCase:
    """Rows sorted by group, some of them after the last group's, and a matrix per group."""

    x: torch.Tensor
    weights: torch.Tensor | Mxfp4Matrices
    ends: torch.Tensor

    def run(self, launcher, tile_rows: int | None = None, device: str = "cpu") -> torch.Tensor:
        """Run the kernel, or the reference without a launcher, into memory full of UNWRITTEN; memory after it stays."""
        shape = (self.x.shape[0] + 1, self.weights.shape[1])
        around = torch.full(shape, float(UNWRITTEN), dtype=self.x.dtype, device=device)
        weights = self.weights
        if isinstance(weights, Mxfp4Matrices):
            weights = Mxfp4Matrices(weights.blocks.to(device), weights.scales.to(device))
        else:
            weights = weights.to(device)
        arguments = (self.x.to(device), weights, self.ends.to(device), around[:-1])
        if launcher is None:
            grouped_matmul_reference(*arguments)
        else:
            grouped_matmul.launch(launcher, *arguments, tile_rows)
        assert (around[-1] == UNWRITTEN).all()
        return around[:-1].cpu()


def grouped_case(
    counts: Sequence[int], num_dummies: int, num_outs: int, width: int, seed=0, *, is_mxfp4=False
) -> GroupedCase:
    """counts: rows per group. Dummies are NaN. is_mxfp4: matrices of all codes, and scales around that of plain ones;
    width is a multiple of 32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((sum(counts) + num_dummies, width), generator=generator)
    x[sum(counts) :] = np.nan
    weights = torch.randn((len(counts), num_outs, width), generator=generator) * width**-0.5
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    if not is_mxfp4:
        return GroupedCase(x.bfloat16(), weights.bfloat16(), ends)
    shape, middle = (len(counts), num_outs), 126 - round(math.log2(width) / 2)
    blocks = torch.randint(0, 256, (*shape, width // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(middle - 2, middle + 1, (*shape, width // 32), generator=generator).to(torch.uint8)
    return GroupedCase(x.bfloat16(), Mxfp4Matrices(blocks, scales), ends)
