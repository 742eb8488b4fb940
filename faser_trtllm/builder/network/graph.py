"""Construct a network: helpers that add layers, weights without copies, named inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder.network.fp8 import Fp8Layers, is_layers
from faser_trtllm.builder.network.options import NetworkOptions, TensorSpec
from faser_trtllm.errors import ConfigError
from faser_trtllm.models.weights import Weights

Array = npt.NDArray[Any]
_LARGEST_FLOAT16 = 65504.0


class Graph:
    """A wrapper that adds layers to an INetworkDefinition. dtype: the trt.DataType of activations and matrices.

    fp8: the source of fp8 matrices and input scales; None: nothing is quantized.

    The network points into the arrays of .weights (by layer name; bf16 as uint16 bits). They must outlive every reader
    of the network, which nothing checks.
    """

    def __init__(
        self, trt: Any, network: Any, options: NetworkOptions, weights: Weights, fp8: Fp8Layers | None = None
    ) -> None:
        self.trt = trt
        self.network = network
        self.options = options
        self.dtypes = {
            "bfloat16": trt.bfloat16,
            "float16": trt.float16,
            "float32": trt.float32,
            "int32": trt.int32,
            "e4m3": trt.fp8,
        }
        self.dtype = self.dtypes[options.dtype]
        self.inputs: dict[str, TensorSpec] = {}
        self.outputs: dict[str, TensorSpec] = {}
        self.weights: dict[str, Array] = {}
        self.literals: set[str] = set()  # the entries of .weights that are not from the checkpoint
        self._source = weights
        self._fp8 = fp8
        self._constants: dict[str, Any] = {}

    def add_input(self, name: str, dtype: str, *shape: int | str) -> Any:
        spec = TensorSpec(name, dtype, shape)
        tensor = self.network.add_input(name, self.dtypes[dtype], spec.trt_shape)
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                tensor.set_dimension_name(axis, size)
        self.inputs[name] = spec
        return tensor

    def mark_output(self, tensor: Any, name: str, dtype: str, *shape: int | str) -> None:
        tensor.name = name
        self.network.mark_output(tensor)
        self.outputs[name] = TensorSpec(name, dtype, shape)

    def matrix(self, *names: str, num_in: int, num_out: tuple[int, ...]) -> Any:
        """Add the named checkpoint matrices [num_out[i], num_in], stacked; a single one is not copied."""

        def read() -> Array:
            parts = [self._read(f"{name}.weight", (rows, num_in)) for name, rows in zip(names, num_out, strict=True)]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        return self._constant(_joined(names) + ".weight", self.options.dtype, (sum(num_out), num_in), read)

    def vector(self, name: str, size: int) -> Any:
        """Add a checkpoint vector [size] of the network's dtype."""
        return self._constant(
            f"{name}.vector", self.options.dtype, (size,), lambda: self._read(f"{name}.weight", (size,))
        )

    def bias(self, *names: str, num_out: tuple[int, ...]) -> Any:
        """Add the biases of the named matrices as [1, sum(num_out)] in the network's dtype."""

        def read() -> Array:
            return np.concatenate(
                [self._read(f"{name}.bias", (size,)) for name, size in zip(names, num_out, strict=True)]
            )

        return self._constant(_joined(names) + ".bias", self.options.dtype, (1, sum(num_out)), read)

    def literal(self, name: str, array: Array) -> Any:
        """Add a float32 or int32 constant; the same name gives the same tensor."""
        self.literals.add(name)
        return self._constant(name, str(array.dtype), array.shape, lambda: array)

    def cast(self, x: Any, dtype: Any) -> Any:
        return x if x.dtype == dtype else self.network.add_cast(x, dtype).get_output(0)

    def elementwise(self, a: Any, b: Any, operation: str) -> Any:
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.network.add_elementwise(a, b, kind).get_output(0)

    def unary(self, x: Any, operation: str) -> Any:
        return self.network.add_unary(x, getattr(self.trt.UnaryOperation, operation)).get_output(0)

    def gather(self, x: Any, index: Any) -> Any:
        return self.network.add_gather(x, index, 0).get_output(0)

    def reshape(self, x: Any, *dims: int, then_transpose: tuple[int, ...] = ()) -> Any:
        layer = self.network.add_shuffle(x)
        layer.reshape_dims = dims
        if then_transpose:
            layer.second_transpose = self.trt.Permutation(then_transpose)
        return layer.get_output(0)

    def transpose(self, x: Any, *order: int, then_reshape: tuple[int, ...] = ()) -> Any:
        layer = self.network.add_shuffle(x)
        layer.first_transpose = self.trt.Permutation(order)
        if then_reshape:
            layer.reshape_dims = then_reshape
        return layer.get_output(0)

    def slice(self, x: Any, axis: int, start: int, size: int) -> Any:
        layer = self.network.add_slice(x, (start,), (size,), (1,))
        layer.axes = (axis,)
        return layer.get_output(0)

    def concatenate(self, tensors: list[Any], axis: int) -> Any:
        layer = self.network.add_concatenation(tensors)
        layer.axis = axis
        return layer.get_output(0)

    def linear(self, x: Any, *names: str, num_in: int, num_out: tuple[int, ...], bias: bool = False) -> Any:
        """Multiply x [rows, num_in] by the named matrices in one GEMM: [rows, sum(num_out)]."""
        if self._fp8 is not None and is_layers(names[0], (sum(num_out), num_in)):
            x, weight = self._quantized(self._fp8, x, names, num_in, num_out)
        else:
            weight = self.matrix(*names, num_in=num_in, num_out=num_out)
        kinds = self.trt.MatrixOperation
        layer = self.network.add_matrix_multiply(x, kinds.NONE, weight, kinds.TRANSPOSE)
        layer.name = _joined(names)
        y = layer.get_output(0)
        return self.elementwise(y, self.bias(*names, num_out=num_out), "SUM") if bias else y

    def _quantized(
        self, fp8: Fp8Layers, x: Any, names: tuple[str, ...], num_in: int, num_out: tuple[int, ...]
    ) -> tuple[Any, Any]:
        """Quantize and dequantize x and the matrix: TensorRT then multiplies e4m3 numbers and scales the product."""
        name, (matrix, scale) = _joined(names), fp8.matrix(names, num_in, num_out)
        bits = self._constant(f"{name}.weight", "e4m3", matrix.bits.shape, lambda: matrix.bits)
        scales = self._constant(f"{name}.weight_scale", "float32", matrix.scales.shape, lambda: matrix.scales)
        weight = self.network.add_dequantize(bits, scales, self.dtype)
        if matrix.has_output_scales:
            weight.axis = 0
        weight.name = f"{name}.weight_dequantize"
        input_scale = self._constant(f"{name}.input_scale", "float32", (), lambda: np.array(scale, np.float32))
        quantize = self.network.add_quantize(x, input_scale, self.trt.fp8)
        quantize.name = f"{name}.quantize"
        dequantize = self.network.add_dequantize(quantize.get_output(0), input_scale, self.dtype)
        dequantize.name = f"{name}.dequantize"
        return dequantize.get_output(0), weight.get_output(0)

    def rms_norm(self, x: Any, name: str, size: int, eps: float) -> Any:
        """Apply RMSNorm over the last axis (of length size) in fp32, then round to the network's dtype."""
        return self.cast(self.rms_norm_float32(x, name, size, eps), self.dtype)

    def rms_norm_float32(self, x: Any, name: str, size: int, eps: float) -> Any:
        """Apply rms_norm() without rounding."""
        rank = len(x.shape)
        wide = self.cast(x, self.trt.float32)
        square = self.elementwise(wide, wide, "PROD")
        mean = self.network.add_reduce(square, self.trt.ReduceOperation.AVG, 1 << (rank - 1), True).get_output(0)
        shifted = self.elementwise(mean, self.literal(f"rms_norm_eps_{rank}", np.full((1,) * rank, eps, "f4")), "SUM")
        normed = self.elementwise(wide, self.unary(self.unary(shifted, "SQRT"), "RECIP"), "PROD")
        gain = self._constant(
            f"{name}.weight",
            "float32",
            (1,) * (rank - 1) + (size,),
            lambda: self._source.float32(f"{name}.weight", (size,)),
        )
        return self.elementwise(normed, gain, "PROD")

    def _constant(self, name: str, dtype: str, shape: tuple[int, ...], read: Callable[[], Array]) -> Any:
        if name not in self._constants:
            array = self.weights[name] = np.ascontiguousarray(read())
            address = array.__array_interface__["data"][0]
            layer = self.network.add_constant(shape, self.trt.Weights(self.dtypes[dtype], address, array.size))
            layer.name = name
            self._constants[name] = layer.get_output(0)
        return self._constants[name]

    def _read(self, name: str, shape: tuple[int, ...]) -> Array:
        if self.options.dtype == "bfloat16":
            return self._source.bfloat16(name, shape)
        array = self._source.float32(name, shape)
        if self.options.dtype == "float32":
            return array
        largest = float(np.abs(array).max(initial=0.0))
        if largest > _LARGEST_FLOAT16:
            raise ConfigError(
                f"dtype is float16, which holds values up to {_LARGEST_FLOAT16:g}, and {name} has {largest:g}; "
                "build with --dtype bfloat16"
            )
        return array.astype(np.float16)


def _joined(names: tuple[str, ...]) -> str:
    return "+".join([names[0], *(name.rpartition(".")[2] for name in names[1:])])
