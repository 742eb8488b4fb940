"""Read a network back: every layer's kind, parameters and tensors. Unknown layers are rejected by name.

get_layer() returns an ILayer; setting its class to the class of its kind exposes its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# By LayerType: the class, and the parameters that define the computation.
_KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ACTIVATION": ("IActivationLayer", ("type", "alpha", "beta")),
    "ATTENTION_INPUT": ("IAttentionInputLayer", ()),
    "ATTENTION_OUTPUT": ("IAttentionOutputLayer", ()),
    "CAST": ("ICastLayer", ("to_type",)),
    "CONCATENATION": ("IConcatenationLayer", ("axis",)),
    "CONSTANT": ("IConstantLayer", ("shape",)),
    "DEQUANTIZE": ("IDequantizeLayer", ("axis", "to_type")),
    "ELEMENTWISE": ("IElementWiseLayer", ("op",)),
    "GATHER": ("IGatherLayer", ("axis", "mode", "num_elementwise_dims")),
    "KV_CACHE_UPDATE": ("IKVCacheUpdateLayer", ("cache_mode", "update_form")),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", ("op0", "op1")),
    "PLUGIN_V3": ("IPluginV3Layer", ()),
    "QUANTIZE": ("IQuantizeLayer", ("axis", "to_type")),
    "REDUCE": ("IReduceLayer", ("op", "axes", "keep_dims")),
    "ROTARY_EMBEDDING": ("IRotaryEmbeddingLayer", ("interleaved", "rotary_embedding_dim")),
    "SELECT": ("ISelectLayer", ()),
    "SHUFFLE": ("IShuffleLayer", ("first_transpose", "reshape_dims", "second_transpose", "zero_is_placeholder")),
    "SLICE": ("ISliceLayer", ("start", "shape", "stride", "mode", "axes")),
    "UNARY": ("IUnaryLayer", ("op",)),
}
_ATTENTION = ("norm_op", "causal_kind", "query_form", "key_value_form", "decomposable")


class UnknownLayerError(NotImplementedError):
    """The network has a layer or a layer parameter that this module does not know."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. inputs: tensor names, None for optional inputs that are not set; layer: TensorRT's object."""

    kind: str
    name: str
    layer: Any
    parameters: dict[str, Any]
    inputs: tuple[str | None, ...]
    outputs: tuple[Any, ...]

    def unknown(self, what: str) -> UnknownLayerError:
        """Return the error for a property of this layer that a reader does not support."""
        return UnknownLayerError(f"layer {self.name} ({self.kind}): {what} is not known")

    def require(self, **expected: Any) -> None:
        """Raise UnknownLayerError unless the parameters have these values."""
        for name, value in expected.items():
            if self.parameters[name] != value:
                raise self.unknown(f"{name} {self.parameters[name]}")


def read_layer(trt: Any, network: Any, index: int) -> Layer:
    """Return layer `index` of a network; UnknownLayerError if its kind is not in the table."""
    layer = network.get_layer(index)
    kind = layer.type.name
    if kind not in _KINDS:
        raise UnknownLayerError(f"layer {layer.name} is of kind {kind}, known are {', '.join(_KINDS)}")
    class_name, names = _KINDS[kind]
    inputs = tuple(layer.get_input(i) for i in range(layer.num_inputs))
    outputs = tuple(layer.get_output(i) for i in range(layer.num_outputs))
    name = layer.name
    layer.__class__ = getattr(trt, class_name)
    parameters = {parameter: _plain(getattr(layer, parameter)) for parameter in names}
    if kind == "ATTENTION_INPUT":
        attention = layer.attention
        parameters = {parameter: _plain(getattr(attention, parameter)) for parameter in _ATTENTION}
        for tensor in ("mask", "key_value_lengths", "query_lengths"):
            value = getattr(attention, tensor)
            parameters[tensor] = None if value is None else value.name
    return Layer(
        kind, name, layer, parameters, tuple(None if tensor is None else tensor.name for tensor in inputs), outputs
    )


def read_layers(trt: Any, network: Any) -> Iterator[Layer]:
    """Yield all layers in the order they were added, which is a valid execution order."""
    for index in range(network.num_layers):
        yield read_layer(trt, network, index)


def _plain(value: Any) -> Any:
    """Convert enumerators to names, dimensions and permutations to tuples."""
    if hasattr(value, "name") and hasattr(type(value), "__members__"):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__name__ in ("Dims", "Dims2", "Dims3", "Dims4"):
        return tuple(value)
    if type(value).__name__ == "Permutation":
        return tuple(value[i] for i in range(len(value)))
    raise UnknownLayerError(f"a layer parameter is of the unknown type {type(value).__name__}")
