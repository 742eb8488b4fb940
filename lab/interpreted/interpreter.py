"""Run a TensorRT network on the CPU with torch: the network that is built, without TensorRT's kernels.

Arithmetic is in fp32 and rounded to the types that the network declares. A product of two dequantized operands is one
step, as it is one kernel in TensorRT. Needs torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder.network.layers import Layer, read_layers
from lab.interpreted import fp8
from lab.interpreted.layers import RULES, Operation

if TYPE_CHECKING:
    import torch

_DTYPES = {
    "BF16": "bfloat16",
    "BOOL": "bool",
    "FP8": "float8_e4m3fn",
    "FLOAT": "float32",
    "HALF": "float16",
    "INT32": "int32",
    "INT64": "int64",
}


@dataclass(frozen=True, slots=True)
class PluginNode:
    """A plugin's stand-in, which runs after the first `position` layers."""

    position: int
    inputs: tuple[str, ...]  # tensor names
    outputs: tuple[str, ...]  # tensor names, which are inputs of the network
    function: Callable[..., tuple[torch.Tensor, ...]]  # takes the input tensors and returns the output tensors


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    operation: Operation
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    declared: tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # dtype and shape of each output, -1 for any size
    last_used: tuple[int, ...]  # values no longer needed


class Interpreter:
    """A network compiled to a list of closures, so that layers and constants are processed only once.

    weights: constants by layer name, as SegmentNetwork.weights, since TensorRT returns neither bf16 nor e4m3 constants.
    Caches are updated in place: a cache output is the tensor that was passed as the input. Unknown layers and
    parameters raise UnknownLayerError with the layer's name.
    """

    def __init__(
        self,
        trt: Any,
        network: Any,
        weights: Mapping[str, npt.NDArray[Any]] | None = None,
        plugin_nodes: Sequence[PluginNode] = (),
    ) -> None:
        import torch

        self._torch = torch
        self._kept = (network, weights)  # keep alive: constants point into their memory
        self._dtypes = {getattr(trt.DataType, name): getattr(torch, dtype) for name, dtype in _DTYPES.items()}
        self._numbers: dict[str, int] = {}
        self._constants: dict[int, torch.Tensor] = {}
        self._steps: list[_Step] = []
        self._dequantized: dict[int, tuple[int | None, ...]] = {}  # e4m3 numbers and scales of a dequantized value
        computed = {name for node in plugin_nodes for name in node.outputs}
        self._inputs: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            if tensor.name not in computed:
                self._inputs[tensor.name] = (self._number(tensor.name), *self._declared(tensor))
        self._compile(trt, network, weights or {}, plugin_nodes)
        self._outputs = {
            network.get_output(i).name: self._numbers[network.get_output(i).name] for i in range(network.num_outputs)
        }
        self._drop_unused_dequantizations()
        self._release_after_last_use()

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(self._inputs)

    def run(self, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return outputs by name for inputs by name; raise ValueError for inputs that are not the network's."""
        if feeds.keys() != self._inputs.keys():
            missing, more = self._inputs.keys() - feeds.keys(), feeds.keys() - self._inputs.keys()
            raise ValueError(f"inputs are not the network's: {sorted(missing)} missing, {sorted(more)} unknown")
        values: list[torch.Tensor | None] = [None] * len(self._numbers)
        for number, constant in self._constants.items():
            values[number] = constant
        for name, (number, dtype, shape) in self._inputs.items():
            self._check(name, feeds[name], dtype, shape)
            values[number] = feeds[name]
        with self._torch.no_grad():
            for step in self._steps:
                results = step.operation(*[None if i is None else values[i] for i in step.inputs])
                results = results if isinstance(results, tuple) else (results,)
                for number, result, declared in zip(step.outputs, results, step.declared, strict=True):
                    self._check(step.name, result, *declared)
                    values[number] = result
                for number in step.last_used:
                    values[number] = None
        outputs = {}
        for name, number in self._outputs.items():
            value = values[number]
            assert value is not None, name
            outputs[name] = value
        return outputs

    def _compile(
        self,
        trt: Any,
        network: Any,
        weights: Mapping[str, npt.NDArray[Any]],
        plugin_nodes: Sequence[PluginNode],
    ) -> None:
        waiting = sorted(plugin_nodes, key=lambda node: node.position)
        declared = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
        for position, layer in enumerate(read_layers(trt, network)):
            while waiting and waiting[0].position <= position:
                self._add_plugin(waiting.pop(0), declared)
            if layer.kind == "CONSTANT":
                number = self._number(layer.outputs[0].name)
                self._constants[number] = self._read_constant(layer, weights)
                continue
            if layer.kind not in RULES:
                raise layer.unknown("this kind")
            types = tuple(self._declared(tensor) for tensor in layer.outputs)
            operation, inputs = self._operation(layer, types[0][0])
            outputs = tuple(self._number(tensor.name) for tensor in layer.outputs)
            if layer.kind == "DEQUANTIZE":
                self._dequantized[outputs[0]] = inputs
            self._steps.append(_Step(layer.name, operation, inputs, outputs, types, ()))
        for node in waiting:
            self._add_plugin(node, declared)

    def _operation(self, layer: Layer, dtype: torch.dtype) -> tuple[Operation, tuple[int | None, ...]]:
        """Return a layer's operation and the values that it takes."""
        inputs = tuple(None if name is None else self._numbers[name] for name in layer.inputs)
        if layer.kind == "MATRIX_MULTIPLY":
            left, right = (self._dequantized.get(number, ()) for number in inputs if number is not None)
            weight = self._constants.get(right[0]) if right and right[0] is not None else None
            if left and weight is not None:
                return fp8.product(layer, dtype, weight), (*left, *right)
        constants = tuple(None if number is None else self._constants.get(number) for number in inputs)
        return RULES[layer.kind](layer, dtype, constants), inputs

    def _drop_unused_dequantizations(self) -> None:
        used = {number for step in self._steps for number in step.inputs} | {*self._outputs.values()}
        self._steps = [
            step for step in self._steps if used & {*step.outputs} or step.outputs[0] not in self._dequantized
        ]

    def _add_plugin(self, node: PluginNode, declared: dict[str, Any]) -> None:
        inputs = tuple(self._numbers[name] for name in node.inputs)
        outputs = tuple(self._number(name) for name in node.outputs)
        types = tuple(self._declared(declared[name]) for name in node.outputs)
        self._steps.append(_Step(node.outputs[0], node.function, inputs, outputs, types, ()))

    def _release_after_last_use(self) -> None:
        last: dict[int, int] = {}
        for index, step in enumerate(self._steps):
            for number in (*step.inputs, *step.outputs):
                if number is not None:
                    last[number] = index
        kept = {*self._constants, *self._outputs.values()}
        for index, step in enumerate(self._steps):
            done = tuple(number for number, at in last.items() if at == index and number not in kept)
            self._steps[index] = _Step(step.name, step.operation, step.inputs, step.outputs, step.declared, done)
        # Drop constants of which layers have prepared their own copy.
        self._constants = {number: constant for number, constant in self._constants.items() if number in last}

    def _read_constant(self, layer: Layer, weights: Mapping[str, npt.NDArray[Any]]) -> torch.Tensor:
        dtype, _ = self._declared(layer.outputs[0])
        array = layer.layer.weights
        if not isinstance(array, np.ndarray):
            if layer.name not in weights or weights[layer.name].size != array.size:
                raise ValueError(f"weights must have {array.size} values of {dtype} under {layer.name}")
            array = weights[layer.name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about read-only memory: nothing here writes to constants
            if dtype is self._torch.bfloat16:
                tensor = self._torch.from_numpy(array.view(np.int16)).view(dtype)
            elif dtype is self._torch.float8_e4m3fn:
                tensor = self._torch.from_numpy(array.view(np.uint8)).view(dtype)
            else:
                tensor = self._torch.from_numpy(array)
        return tensor.reshape(layer.parameters["shape"])

    def _number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _declared(self, tensor: Any) -> tuple[torch.dtype, tuple[int, ...]]:
        return self._dtypes[tensor.dtype], tuple(tensor.shape)

    def _check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if tensor.dtype is not dtype or len(tensor.shape) != len(shape):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, declared is {dtype} {list(shape)}")
        for size, wanted in zip(tensor.shape, shape, strict=True):
            if wanted not in (size, -1):
                raise ValueError(f"{name} has shape {list(tensor.shape)}, declared is {list(shape)}")
