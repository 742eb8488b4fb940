"""Entry point of the network builder: a range of decoder layers as one TensorRT network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser_trtllm.builder.network.attention import choose_attention
from faser_trtllm.builder.network.decoder import add_embedding, add_head, add_layer
from faser_trtllm.builder.network.fp8 import Fp8Layers
from faser_trtllm.builder.network.graph import Array, Graph
from faser_trtllm.builder.network.options import NetworkOptions, TensorSpec, hidden_output
from faser_trtllm.builder.network.specification import specification
from faser_trtllm.builder.network.vendor import create_network, load_tensorrt, logger
from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.models.config import ModelConfig
from faser_trtllm.models.weights import Weights

__all__ = [
    "NetworkOptions",
    "SegmentNetwork",
    "TensorSpec",
    "build_segment",
    "create_network",
    "load_tensorrt",
    "logger",
]


@dataclass(frozen=True)
class SegmentNetwork:
    """A network with everything it points to: keep it alive until the build is over.

    name: "layers 0-4", or "early_exit". flavour: "native" or "plugin". plugins: ids of its plugins.
    inputs, outputs: bindings in the network's order.
    weights: constants by their layer's name, bf16 as uint16 and e4m3 as uint8 bits.
    specification: sha256 of the network's definition, hex.
    """

    name: str
    network: Any
    flavour: str
    plugins: tuple[str, ...]
    options: NetworkOptions
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights: Mapping[str, Array]
    specification: str

    def profiles(self, builder: Any) -> list[Any]:
        """Return an IOptimizationProfile for each of options.profile_rows, and then one for max_num_tokens."""
        profiles = []
        for max_rows in (*self.options.profile_rows, self.options.max_num_tokens):
            ranges = self.options.dimension_ranges(max_rows)
            profile = builder.create_optimization_profile()
            for spec in self.inputs:
                if spec.is_dynamic:
                    limits = [
                        tuple(ranges[size][i] if isinstance(size, str) else size for size in spec.shape)
                        for i in range(3)
                    ]
                    profile.set_shape(spec.name, *limits)
            profiles.append(profile)
        return profiles


def build_segment(
    trt: Any,
    network: Any,
    config: ModelConfig,
    weights: Weights,
    first: int,
    last: int,
    options: NetworkOptions,
    fp8: Fp8Layers | None = None,
) -> SegmentNetwork:
    """Fill an empty network (create_network) with the layers [first, last) of a decoder.

    The first segment has the input token_ids [rows], the others hidden_in [rows, hidden_size]. The last has the output
    logits [logit_rows, vocab_size] for the rows in logit_rows, the others hidden_out [rows, hidden_size]; all have the
    options' dtype. Hidden rows of options.read_layers are outputs hidden_N, except those passed to the next segment.
    Raises ConfigError if TensorRT cannot meet the options, CheckpointError for wrong weights.
    """
    if not 0 <= first < last <= config.num_layers:
        raise InvalidArgumentError(f"layers are [{first}, {last}); they must lie within [0, {config.num_layers}]")
    graph = Graph(trt, network, options, weights, fp8)
    if first == 0:
        x = add_embedding(graph, config, graph.add_input("token_ids", "int32", "rows"))
    else:
        x = graph.add_input("hidden_in", options.dtype, "rows", config.hidden_size)
    attention = choose_attention(graph, config)
    attention.add_inputs()
    for layer_index in range(first, last):
        if layer_index > first or first == 0:
            _mark_read(graph, config, layer_index, x)
        x = add_layer(graph, config, attention, layer_index, x)
    if last == config.num_layers:
        _mark_read(graph, config, last, x)
        x = graph.gather(x, graph.add_input("logit_rows", "int32", "logit_rows"))
        graph.mark_output(add_head(graph, config, x), "logits", options.dtype, "logit_rows", config.vocab_size)
    else:
        graph.mark_output(x, "hidden_out", options.dtype, "rows", config.hidden_size)
    return finish(graph, f"layers {first}-{last}", attention.flavour, attention.plugins)


def _mark_read(graph: Graph, config: ModelConfig, layer: int, x: Any) -> None:
    if layer in graph.options.read_layers:
        graph.mark_output(x, hidden_output(layer), graph.options.dtype, "rows", config.hidden_size)


def finish(graph: Graph, name: str, flavour: str, plugins: tuple[str, ...]) -> SegmentNetwork:
    return SegmentNetwork(
        name=name,
        network=graph.network,
        flavour=flavour,
        plugins=plugins,
        options=graph.options,
        inputs=tuple(graph.inputs.values()),
        outputs=tuple(graph.outputs.values()),
        weights=graph.weights,
        specification=specification(graph),
    )
