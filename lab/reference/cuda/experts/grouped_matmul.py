"""Reference of ops/cuda/experts/grouped_matmul.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def grouped_matmul_reference(x: Tensor, weights: Tensor, ends: Tensor, out: Tensor) -> None:
    """Compute rows of out [n, outs], x [n, width] times their group's matrix of weights [num_groups, outs, width].

    ends int32 [num_groups]: the number of rows up to and including each group's. Sums are in float64 and rounded once.
    Rows after the last group are not written.
    """
    begin = 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        out[begin:end] = (x[begin:end].double() @ weight.double().t()).to(out.dtype)
        begin = end
