"""Quantize rows to e4m3 with one scale per row, the operand format of fp8 GEMMs.

Reads a row and writes half of it, which bounds its time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.ops.cuda.driver import Launcher
from faser_trtllm.ops.cuda.tensors import pointer

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 16
"""Both sizes of a matrix must be multiples of this: torch's fp8 GEMM needs 16-byte alignment."""

NUM_THREADS = 256

# A float32 has 8 bits of exponent above 23 of mantissa. e4m3's largest number, 448, is 1.75 x 2^8, so a number whose
# mantissa is above 1.75 needs a scale twice as large. Adding this carries into the exponent exactly for those.
_CARRY_BEYOND_1_75 = 0x1FFFFF
_EIGHT_BINADES = 8 << 23
_EXPONENT_BITS = 0x7F800000
_SMALLEST_SCALE = 64 << 23  # 2^-63, so that rows of zeros have a scale and products of two scales stay normal


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """A matrix as values x scales. A number's error is at most 1/16 of it or, if more, 2^-17 of its row's largest."""

    values: Tensor  # e4m3 [num_rows, width]
    scales: Tensor  # fp32 [num_rows, 1]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.values, self.scales))

    def dequantized(self) -> Tensor:
        """Return fp32 [num_rows, width], exactly the values that the e4m3 numbers represent."""
        return self.values.float() * self.scales


def quantize_rows(x: Tensor) -> ScaledRows:
    """Quantize rows [num_rows, width] to e4m3, each scaled by the smallest power of two that keeps it within 448.

    A power of two scales exactly, costs less than one binade of range, and does not change with the last bit of the
    largest number. Each row is quantized independently. NaN stays NaN. Uses torch, on any device and for any
    floating-point dtype, for weights and as the kernel's reference.
    """
    import torch

    largest = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True, dtype=torch.float32)
    bits = (largest.view(torch.int32) + (_CARRY_BEYOND_1_75 - _EIGHT_BINADES)).clamp_(min=_SMALLEST_SCALE)
    scales = bits.bitwise_and_(_EXPONENT_BITS).view(torch.float32)
    return ScaledRows((x / scales).to(torch.float8_e4m3fn), scales)


def launch(launcher: Launcher, x: Tensor, found: ScaledRows) -> None:
    """Launch the kernel that does quantize_rows() of x torch.bfloat16 [num_rows, width], into the tensors of `found`.

    width and addresses must be multiples of 16. Contiguous device tensors; asynchronous.
    """
    _launch(launcher, "quantize_rows", x, (), found)


def launch_add(launcher: Launcher, x: Tensor, hidden: Tensor, found: ScaledRows) -> None:
    """Compute hidden += x, both torch.bfloat16 [num_rows, width], and quantize hidden into `found`; see
    launch()."""
    _check_alignment("hidden", hidden)
    _launch(launcher, "add_quantize_rows", x, (pointer("hidden", hidden, "bf16", tuple(x.shape)),), found)


def _launch(
    launcher: Launcher, kernel: str, x: Tensor, outputs: tuple[ctypes.c_void_p, ...], found: ScaledRows
) -> None:
    num_rows, width = x.shape
    _check_alignment("x", x)
    arguments = (
        pointer("x", x, "bf16", (None, None)),
        ctypes.c_int32(num_rows),
        ctypes.c_int32(width),
        *outputs,
        pointer("values", found.values, "e4m3", (num_rows, width)),
        pointer("scales", found.scales, "fp32", (num_rows, 1)),
    )
    launcher.launch(kernel, (max(1, num_rows), 1, 1), (NUM_THREADS, 1, 1), arguments)


def _check_alignment(name: str, x: Tensor) -> None:
    if x.shape[1] % ALIGNMENT or x.data_ptr() % ALIGNMENT:
        raise InvalidArgumentError(
            f"{name} has rows of {x.shape[1]} at address {x.data_ptr()}; both must be multiples of {ALIGNMENT}"
        )
