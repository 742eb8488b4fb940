"""Cases of route_rows and combine_rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from faser_trtllm.ops.cuda.experts import combine_rows, route_rows
from faser_trtllm.ops.cuda.experts.route_rows import Choice, Routes
from lab.reference.cuda.experts.combine_rows import combine_rows_reference
from lab.reference.cuda.experts.route_rows import route_rows_reference

UNWRITTEN = 77


@dataclasses.dataclass
class RouteCase:
    """Rows of which the first num_used are no dummies. x and router are bf16."""

    x: torch.Tensor
    router: torch.Tensor
    num_used: int
    choice: Choice

    def run(self, launcher, device: str = "cpu", before: int | None = None) -> Routes:
        """Run the kernels, or the reference without a launcher. before: experts counted in layers before this one;
        None: it is the first."""
        routes = Routes.of(len(self.x), len(self.router), self.choice, torch.device(device))
        for name in routes.__slots__:
            getattr(routes, name).fill_(UNWRITTEN if name != "num_distinct" else before or UNWRITTEN)
        used = torch.tensor([self.num_used], dtype=torch.int32, device=device)
        arguments = (self.x.to(device), self.router.to(device), used, self.choice, before is None, routes)
        if launcher is None:
            route_rows_reference(*arguments)
        else:
            route_rows.launch(launcher, *arguments)
        return Routes(*(getattr(routes, name).cpu() for name in routes.__slots__))


def whole_case(
    num_rows: int, num_used: int, num_experts: int, top_k: int, width: int = 64, *, over_all=False, others=0, seed=0
) -> RouteCase:
    """Small whole numbers, whose sums are exact and often equal."""
    generator = torch.Generator().manual_seed(seed)
    x, router = (
        torch.randint(-1, 2, (n, width), generator=generator).bfloat16() for n in (num_rows, num_experts + others)
    )
    return RouteCase(x, router, num_used, Choice(num_experts, top_k, over_all))


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

    def run(self, launcher, device: str = "cpu") -> torch.Tensor:
        """Run as RouteCase.run does and check that memory after the last row is unchanged."""
        around = torch.full((len(self.hidden) + 1, self.hidden.shape[1]), 7.0, dtype=self.hidden.dtype, device=device)
        hidden = around[:-1]
        hidden.copy_(self.hidden)
        used = torch.tensor([self.num_used], dtype=torch.int32, device=device)
        routes = Routes(*(getattr(self.routes, name).to(device) for name in self.routes.__slots__))
        shared = None if self.shared is None else self.shared.to(device)
        arguments = (self.outputs.to(device), routes, shared, used, hidden)
        if launcher is None:
            combine_rows_reference(*arguments)
        else:
            combine_rows.launch(launcher, *arguments)
        assert (around[-1] == 7).all()
        return hidden.cpu()


def combine_case(num_rows: int, num_used: int, top_k: int, width: int, *, has_shared=False, seed=0) -> CombineCase:
    """Outputs of pairs that do not exist are NaN."""
    generator = torch.Generator().manual_seed(seed)
    routes = whole_case(num_rows, num_used, 8, top_k, others=int(has_shared), seed=seed).run(None)
    outputs = torch.randn((num_rows * top_k, width), generator=generator).bfloat16()
    outputs[max(num_used, 0) * top_k :] = np.nan
    hidden, shared = torch.randn((2, num_rows, width), generator=generator).bfloat16()
    return CombineCase(routes, outputs, shared if has_shared else None, hidden.contiguous(), num_used)
