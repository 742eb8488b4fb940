"""Reference of ops/cuda/experts/grouped_matmul.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.models.mxfp4 import mxfp4_values
from faser_trtllm.ops.cuda.experts.grouped_matmul import Mxfp4Matrices

if TYPE_CHECKING:
    from torch import Tensor


def decoded(weights: Mxfp4Matrices) -> Tensor:
    """Return the matrices' values in bf16, without loss."""
    import torch

    num_groups, num_outs, width = weights.shape
    blocks, scales = (
        weights.blocks.numpy().reshape(-1, width // 32, 16),
        weights.scales.numpy().reshape(-1, width // 32),
    )
    return torch.from_numpy(mxfp4_values(blocks, scales)).view(num_groups, num_outs, width).bfloat16()


def grouped_matmul_reference(x: Tensor, weights: Tensor | Mxfp4Matrices, ends: Tensor, out: Tensor) -> None:
    """Compute rows of out [n, outs], x [n, width] times their group's matrix of weights [num_groups, outs, width].

    ends int32 [num_groups]: the number of rows up to and including each group's. Sums are in float64 and rounded once.
    Rows after the last group are not written.
    """
    if isinstance(weights, Mxfp4Matrices):
        weights = decoded(weights)
    begin = 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        out[begin:end] = (x[begin:end].double() @ weight.double().t()).to(out.dtype)
        begin = end
