"""A case of matmul, and how close results must be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from faser_trtllm.ops.cuda.products import matmul as op
from lab.reference.cuda.products.matmul import matmul_reference
from tests.ops.cuda.paged_cases import TORCH_TYPES


@dataclass
class Case:
    """Random rows and weights; with an addend, which the result replaces, and a bias."""

    x: torch.Tensor
    weight: torch.Tensor
    addend: torch.Tensor | None
    bias: torch.Tensor | None
    result_type: torch.dtype

    @classmethod
    def random(
        cls,
        num_rows: int,
        num_outs: int,
        width: int,
        types: tuple[str, str] = ("bf16", "bf16"),
        has_addend: bool = False,
        has_bias: bool = False,
        seed: int = 0,
    ) -> Case:
        """types: of the operands and of the result."""
        generator = torch.Generator().manual_seed(seed)
        kind, result = (TORCH_TYPES[name] for name in types)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        return cls(
            random(num_rows, width).to(kind),
            (random(num_outs, width) / math.sqrt(width)).to(kind),
            random(num_rows, num_outs).to(result) if has_addend else None,
            random(num_outs).to(kind) if has_bias else None,
            result,
        )

    def run(self, launcher, tile_rows: int | None = None, device: str = "cpu") -> torch.Tensor:
        """Return what the kernel writes and check that memory after the last row is unchanged."""
        x, weight = self.x.to(device), self.weight.to(device)
        bias = None if self.bias is None else self.bias.to(device)
        out = torch.full((len(x) + 1, len(weight)), 7.0, device=device).to(self.result_type)
        if self.addend is not None:
            out[:-1] = self.addend.to(device)
        op.launch(launcher, x, weight, out[:-1], None if self.addend is None else out[:-1], bias, tile_rows)
        assert (out[-1] == 7).all()
        return out[:-1].cpu()

    def reference(self) -> torch.Tensor:
        out = torch.empty((len(self.x), len(self.weight)), dtype=self.result_type)
        matmul_reference(self.x, self.weight, out, self.addend, self.bias)
        return out


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[found.dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=step, atol=1e-5)
