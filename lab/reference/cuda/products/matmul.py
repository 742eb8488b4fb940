"""Reference of ops/cuda/products/matmul.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def matmul_reference(
    x: Tensor, weight: Tensor, out: Tensor, addend: Tensor | None = None, bias: Tensor | None = None
) -> None:
    """Compute out [n, outs] = x [n, width] times weight [outs, width], plus addend [n, outs], plus bias [outs].

    Sums are in float64 and rounded once. out: of x's type, bf16 or fp16, or fp32. addend: of out's type, may be out.
    """
    sums = x.double() @ weight.double().t()
    for more in (addend, bias):
        sums = sums if more is None else sums + more.double()
    out.copy_(sums)
