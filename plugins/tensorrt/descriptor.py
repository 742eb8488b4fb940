"""Helpers that turn a plugin's functions into a tensorrt.plugin descriptor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from faser_trtllm.errors import InvalidArgumentError

Function = Callable[..., Any]


def register_plugin(
    trtp: Any,
    plugin_id: str,
    describe: Function,
    implement: Function,
    *,
    num_outputs: int,
    attributes: Mapping[str, type] | None = None,
    autotune: Function | None = None,
) -> None:
    """Register a plugin's functions with tensorrt.plugin; all parameters except the attributes are tensors.

    TensorRT reads types from annotation objects, which are attached here, since our modules do not import tensorrt.
    """
    attributes = attributes or {}
    describe.__annotations__ = {
        name: attributes.get(name, trtp.TensorDesc) for name in inspect.signature(describe).parameters
    } | {"return": tuple[(trtp.TensorDesc,) * num_outputs]}  # type: ignore[misc]
    implement.__annotations__ = {"return": tuple[str, bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]}
    trtp.register(plugin_id)(describe)
    trtp.aot_impl(plugin_id)(implement)
    if autotune is not None:
        trtp.autotune(plugin_id)(autotune)


def launch_params(trtp: Any, grid: Sequence[Any], num_threads: int) -> Any:
    """Return trtp.KernelLaunchParams of a grid (x, y, z), each an int or a symbolic expression."""
    params = trtp.KernelLaunchParams()
    params.grid_x, params.grid_y, params.grid_z = grid
    params.block_x = num_threads
    return params


def scalars(trtp: Any, values: Sequence[Any]) -> Any:
    """Return trtp.SymIntExprs of a kernel's int32 arguments, which come between its inputs and outputs."""
    arguments = trtp.SymIntExprs(len(values))
    for i, value in enumerate(values):
        arguments[i] = trtp.SymInt32(value)
    return arguments


def constant(name: str, size: Any) -> int:
    """Return a dimension as a number; raise InvalidArgumentError if it is dynamic."""
    if size.is_fake or not size.is_constant:
        raise InvalidArgumentError(f"{name} is dynamic; the plugins need it fixed when the network is built")
    return int(size.constant_value())


def type_name(trt: Any, name: str, dtype: Any) -> str:
    """Return the kernels' name for a tensor's type, "bf16" or "fp16"; raise InvalidArgumentError for others."""
    names = {trt.DataType.BF16: "bf16", trt.DataType.HALF: "fp16"}
    if dtype not in names:
        raise InvalidArgumentError(f"{name} has type {dtype}; the plugins have kernels for BF16 and HALF")
    return names[dtype]


def expect(plugin_id: str, **tensors: tuple[Any, Any, int]) -> None:
    """Raise InvalidArgumentError, naming the input, unless each (descriptor, dtype, number of dimensions) agrees."""
    for name, (desc, dtype, ndim) in tensors.items():
        if desc.dtype != dtype:
            raise InvalidArgumentError(f"{name} of {plugin_id} has type {desc.dtype}; it must be {dtype}")
        if desc.ndim != ndim:
            raise InvalidArgumentError(f"{name} of {plugin_id} has {desc.ndim} dimensions; it must have {ndim}")
