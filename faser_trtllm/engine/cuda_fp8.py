"""Matrices in e4m3 with a scale per row, and their products: weights are scaled when loaded, activations in each pass.

Not run on a GPU yet; on the CPU torch's own product is compared with the reference below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIN_CAPABILITY = (8, 9)
ALIGNMENT = 16
"""Both sizes of a matrix are multiples of it: torch's product wants whole 16 byte pieces."""

# The bits of a float32: 8 of exponent over 23 of mantissa. e4m3's largest number, 448, is 1.75 x 2^8, so a number whose
# mantissa is beyond 1.75 needs a scale twice as large; adding this carries into the exponent just then.
_CARRY_BEYOND_1_75 = 0x1FFFFF
_EIGHT_BINADES = 8 << 23
_EXPONENT_BITS = 0x7F800000
_SMALLEST_SCALE = 64 << 23  # 2^-63: a row of zeros has a scale too, and products of two scales stay normal numbers


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """values e4m3 [num_rows, width], scales fp32 [num_rows, 1]: the matrix is values x scales.

    Each number is within 1/16 of itself, or within 2^-17 of its row's largest where that is more.
    """

    values: Tensor
    scales: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.values, self.scales))

    def dequantized(self) -> Tensor:
        """fp32 [num_rows, width], exactly what the e4m3 numbers stand for."""
        return self.values.float() * self.scales


def quantize_rows(x: Tensor) -> ScaledRows:
    """Rows [num_rows, width] in e4m3, each by the smallest power of two that brings its largest number to 448 or less.

    A power of two loses a floating-point format nothing but part of a binade of range, scales exactly, and does not
    change with the last bit of the largest number. What a row becomes depends on that row alone. NaN stays NaN.
    """
    import torch

    largest = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True, dtype=torch.float32)
    bits = (largest.view(torch.int32) + (_CARRY_BEYOND_1_75 - _EIGHT_BINADES)).clamp_(min=_SMALLEST_SCALE)
    scales = bits.bitwise_and_(_EXPONENT_BITS).view(torch.float32)
    return ScaledRows((x / scales).to(torch.float8_e4m3fn), scales)


def scaled_linear(x: Tensor, weight: ScaledRows, bias: Tensor | None) -> Tensor:
    """x bf16 [n, in] in e4m3, times weight [out, in], plus bias [out] -> bf16 [n, out], new."""
    import torch

    rows = quantize_rows(x)
    y: Tensor = torch._scaled_mm(
        rows.values,
        weight.values.t(),
        scale_a=rows.scales,
        scale_b=weight.scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return y if bias is None else y + bias


def scaled_linear_reference(x: Tensor, weight: ScaledRows, bias: Tensor | None) -> Tensor:
    """As scaled_linear, for any dtype of x. The sums are exact, so a row's result cannot depend on the other rows.

    Products of e4m3 numbers are multiples of 2^-18 below 2^18: float64 adds 2^17 of them without rounding.
    """
    rows = quantize_rows(x)
    y = (rows.values.double() @ weight.values.double().t()) * rows.scales.double() * weight.scales.double().t()
    return (y if bias is None else y.to(x.dtype) + bias).to(x.dtype)


def check_capability(capability: tuple[int, int], name: str) -> None:
    """ConfigError unless a GPU of this compute capability has e4m3 products."""
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            f"quantization is fp8, {name} has compute capability {capability[0]}.{capability[1]}, and fp8 products "
            f"begin at {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}; set quantization to none"
        )


def check_product(device: torch.device) -> None:
    """ConfigError unless torch multiplies with row-wise scales on this device: not every build does on every GPU."""
    import torch

    ones = torch.ones((ALIGNMENT, ALIGNMENT), dtype=torch.bfloat16, device=device)
    try:
        found = scaled_linear(ones, quantize_rows(ones), None)
    except (RuntimeError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ConfigError(
            f"quantization is fp8, and torch {torch.__version__} has no product of e4m3 rows here ({reason}); "
            "install another build of torch or set quantization to none"
        ) from error
    if not bool((found == ALIGNMENT).all()):
        raise ConfigError(
            f"quantization is fp8, and torch {torch.__version__} multiplies e4m3 rows wrongly here; install another "
            "build of torch or set quantization to none"
        )


def check_matrix(name: str, shape: tuple[int, ...], dtype: str) -> None:
    """ConfigError unless this matrix of an engine file can be multiplied in e4m3."""
    if dtype != "bfloat16":
        raise ConfigError(
            f"quantization is fp8, which needs engines of bfloat16, these are {dtype}; rebuild them with "
            "--dtype bfloat16 or set quantization to none"
        )
    if any(size % ALIGNMENT for size in shape):
        raise ConfigError(
            f"quantization is fp8, {name} is {shape[0]} x {shape[1]}, and both sizes must be multiples of {ALIGNMENT}; "
            "set quantization to none"
        )
