"""Rules for layers that quantize to e4m3 and back, and for a product of two dequantized operands.

They follow IQuantizeLayer and IDequantizeLayer in TensorRT's header NvInfer.h. To quantize, a number is divided by the
scale, rounded to nearest, ties to even, and saturated at 448; to dequantize, it is multiplied by the scale. Scales are
positive constants: one, or one per index of an axis for constants, whose length TensorRT checks itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from faser_trtllm.builder.network.layers import Layer

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
Constants = tuple["torch.Tensor | None", ...]


def quantize(layer: Layer, dtype: torch.dtype, constants: Constants) -> Callable[..., torch.Tensor]:
    """Turn x of a floating-point type and a scale into e4m3 of x's shape. Raises ValueError where TensorRT refuses."""
    scale = _scale(layer, constants)
    if scale.numel() != 1:
        raise ValueError(f"{layer.name}: activations have one scale, not {list(scale.shape)}")

    def run(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        _check_types(layer, scale.dtype, x.dtype)
        if not x.ndim:
            raise ValueError(f"{layer.name}: a scalar cannot be quantized")
        return (x.float() / scale.float()).clamp(-LARGEST, LARGEST).to(dtype)  # torch before 2.13 may not saturate

    return run


def dequantize(layer: Layer, dtype: torch.dtype, constants: Constants) -> Callable[..., torch.Tensor]:
    """Turn e4m3 and a scale into numbers of the layer's type. Raises ValueError where TensorRT refuses."""
    scale = _scale(layer, constants)
    _check_types(layer, scale.dtype, dtype)
    shape = _broadcast_shape(layer, scale, constants[0])
    return lambda x, scale: (x.float() * scale.float().reshape(shape)).to(dtype)


def product(layer: Layer, dtype: torch.dtype, weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Multiply two dequantized operands of a MATRIX_MULTIPLY, which is one kernel in TensorRT.

    Inputs are e4m3 x [rows, in] with its scale, and weight [out, in], a constant, with scales [] or [out]; the result
    is [rows, out]. The e4m3 numbers are multiplied and the sums scaled. Products are multiples of 2^-18 below 2^18, so
    float64 adds 2^17 of them without rounding: a row's result does not depend on other rows.
    """
    layer.require(op0="NONE", op1="TRANSPOSE")
    prepared = weight.double().mT

    def run(x: torch.Tensor, x_scale: torch.Tensor, _: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return ((x.double() @ prepared) * (x_scale.double() * scales.double())).to(dtype)

    return run


def _scale(layer: Layer, constants: Constants) -> torch.Tensor:
    if len(constants) != 2:
        raise layer.unknown("a zero point")
    scale = constants[1]
    if scale is None:
        raise layer.unknown("a scale that is not a constant")
    if scale.ndim > 1:
        raise layer.unknown(f"a scale of shape {list(scale.shape)}")
    if not bool((scale > 0).all()):
        raise ValueError(f"{layer.name}: scales must be positive")
    return scale


def _check_types(layer: Layer, scale: torch.dtype, number: torch.dtype) -> None:
    import torch

    if number not in (torch.float32, torch.float16, torch.bfloat16) or scale not in (torch.float32, number):
        raise ValueError(f"{layer.name}: a scale of {scale} does not go with {number}")


def _broadcast_shape(layer: Layer, scale: torch.Tensor, constant: torch.Tensor | None) -> tuple[int, ...]:
    if scale.numel() == 1:
        return ()
    axis = layer.parameters["axis"]
    if constant is None:
        raise ValueError(f"{layer.name}: activations have one scale, not {list(scale.shape)}")
    return tuple(scale.numel() if i == axis else 1 for i in range(constant.ndim))
