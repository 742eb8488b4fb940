"""Rules that turn each kind of layer into a closure over torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from faser_trtllm.builder.network.layers import Layer
from lab.interpreted import attention as interpreter_attention
from lab.interpreted import fp8

if TYPE_CHECKING:
    import torch

Operation = Callable[..., Any]
Constants = tuple["torch.Tensor | None", ...]
Rule = Callable[[Layer, "torch.dtype", Constants], Operation]

_ELEMENTWISE = {
    "SUM": "add",
    "SUB": "sub",
    "PROD": "mul",
    "MAX": "maximum",
    "MIN": "minimum",
    "GREATER": "gt",
    "LESS": "lt",
    "EQUAL": "eq",
    "AND": "logical_and",
    "OR": "logical_or",
}
_UNARY = {"SQRT": "sqrt", "RECIP": "reciprocal", "NOT": "logical_not", "NEG": "neg", "EXP": "exp"}


def _elementwise(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    import torch

    if layer.parameters["op"] not in _ELEMENTWISE:
        raise layer.unknown(f"op {layer.parameters['op']}")
    operation: Operation = getattr(torch, _ELEMENTWISE[layer.parameters["op"]])
    return operation


def _unary(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    import torch

    if layer.parameters["op"] not in _UNARY:
        raise layer.unknown(f"op {layer.parameters['op']}")
    operation: Operation = getattr(torch, _UNARY[layer.parameters["op"]])
    return operation


def _activation(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    layer.require(type="SIGMOID")
    return lambda x: x.float().sigmoid().to(dtype)


def _cast(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    return lambda x: x.to(dtype)


def _select(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    import torch

    return torch.where


def _concatenation(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    import torch

    axis = layer.parameters["axis"]
    return lambda *tensors: torch.cat(tensors, axis)


def _gather(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    layer.require(axis=0, mode="DEFAULT", num_elementwise_dims=0)

    def run(data: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if index.numel() and int(index.min()) < 0:
            raise ValueError(f"{layer.name}: index {int(index.min())} is out of range")
        return data.index_select(0, index.reshape(-1)).reshape(*index.shape, *data.shape[1:])

    return run


def _matrix_multiply(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    transposed = [layer.parameters[name] for name in ("op0", "op1")]
    if any(kind not in ("NONE", "TRANSPOSE") for kind in transposed):
        raise layer.unknown(f"op0 {transposed[0]} and op1 {transposed[1]}")

    def side(x: torch.Tensor, kind: str) -> torch.Tensor:
        return x.float().mT if kind == "TRANSPOSE" else x.float()

    if constants[1] is None:
        return lambda a, b: (side(a, transposed[0]) @ side(b, transposed[1])).to(dtype)
    prepared = side(constants[1], transposed[1])
    return lambda a, b: (side(a, transposed[0]) @ prepared).to(dtype)


def _reduce(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    operation, keep = layer.parameters["op"], layer.parameters["keep_dims"]
    axes = [axis for axis in range(8) if layer.parameters["axes"] >> axis & 1]
    if operation == "AVG":
        return lambda x: x.float().mean(axes, keepdim=keep).to(dtype)
    if operation == "SUM":
        return lambda x: x.float().sum(axes, keepdim=keep).to(dtype)
    raise layer.unknown(f"op {operation}")


def _shuffle(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    layer.require(zero_is_placeholder=True)
    first, second = layer.parameters["first_transpose"], layer.parameters["second_transpose"]
    dims = layer.parameters["reshape_dims"]

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.permute(first[: x.ndim])
        if dims is not None:  # 0 keeps a dimension
            x = x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(dims)])
        return x.permute(second[: x.ndim])

    return run


def _slice(layer: Layer, dtype: torch.dtype, constants: Constants) -> Operation:
    layer.require(mode="STRICT_BOUNDS")
    if len(layer.inputs) > 1 or layer.parameters["axes"] is None:
        raise layer.unknown("a slice without axes, or with tensors for its bounds,")
    bounds = [
        (axis, start, start + size * stride, stride)
        for axis, start, size, stride in zip(*(layer.parameters[name] for name in _SLICE), strict=True)
    ]

    def run(x: torch.Tensor) -> torch.Tensor:
        for axis, start, end, stride in bounds:
            if end - stride >= x.shape[axis]:
                raise ValueError(f"{layer.name}: axis {axis} of {x.shape[axis]} is sliced up to {end}")
            x = x[(slice(None),) * axis + (slice(start, end, stride),)]
        return x

    return run


_SLICE = ("axes", "start", "shape", "stride")

RULES: dict[str, Rule] = {
    "ACTIVATION": _activation,
    "ATTENTION_INPUT": interpreter_attention.attention,
    "ATTENTION_OUTPUT": lambda layer, dtype, constants: lambda x: x,
    "CAST": _cast,
    "CONCATENATION": _concatenation,
    "DEQUANTIZE": fp8.dequantize,
    "ELEMENTWISE": _elementwise,
    "GATHER": _gather,
    "KV_CACHE_UPDATE": interpreter_attention.kv_cache_update,
    "MATRIX_MULTIPLY": _matrix_multiply,
    "QUANTIZE": fp8.quantize,
    "REDUCE": _reduce,
    "ROTARY_EMBEDDING": interpreter_attention.rotary_embedding,
    "SELECT": _select,
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "UNARY": _unary,
}
