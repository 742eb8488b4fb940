"""The reference of engine/gpu/fp8.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.ops.cuda.quantize_rows import ScaledRows, quantize_rows

if TYPE_CHECKING:
    from torch import Tensor


def scaled_linear_reference(x: Tensor, weight: ScaledRows, bias: Tensor | None) -> Tensor:
    """Compute scaled_linear for any dtype of x. The sums are exact, so a row's result cannot depend on other rows.

    Products of e4m3 numbers are multiples of 2^-18 below 2^18, so float64 adds 2^17 of them without rounding.
    """
    rows = quantize_rows(x)
    y = (rows.values.double() @ weight.values.double().t()) * rows.scales.double() * weight.scales.double().t()
    return (y if bias is None else y.to(x.dtype) + bias).to(x.dtype)
