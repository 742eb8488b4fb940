"""Hash a network's definition, which is reproducible, unlike engines."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from faser_trtllm.builder.network.graph import Graph
from faser_trtllm.builder.network.layers import read_layers


def specification(graph: Graph) -> str:
    """Return a sha256 (hex) of the layers in order, their parameters and connections, shapes, dtypes and the options.

    The checkpoint's values are not part of it (manifests hash the checkpoint itself); our own constants are, by value.
    """
    digest = hashlib.sha256()

    def add(entry: dict[str, Any]) -> None:
        digest.update(json.dumps(entry, sort_keys=True).encode() + b"\n")

    options = dataclasses.asdict(graph.options)
    del options["read_layers"]  # they are among the outputs
    add({"version": 1, "options": options})
    network = graph.network
    numbers: dict[str, int] = {}
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        numbers[tensor.name] = len(numbers)
        add({"input": tensor.name, **_tensor(tensor)})
    for layer in read_layers(graph.trt, network):
        for tensor in layer.outputs:
            numbers[tensor.name] = len(numbers)
        entry = {
            "kind": layer.kind,
            "parameters": {
                name: numbers.get(value, value) if _is_tensor(name) else value
                for name, value in layer.parameters.items()
            },
            "inputs": [None if name is None else numbers[name] for name in layer.inputs],
            "outputs": [_tensor(tensor) for tensor in layer.outputs],
        }
        if layer.kind == "PLUGIN_V3":
            entry["name"] = layer.name
        elif layer.kind == "CONSTANT" and layer.name in graph.literals:
            entry["value"] = hashlib.sha256(graph.weights[layer.name].tobytes()).hexdigest()
        add(entry)
    add({"outputs": [[name, numbers[name]] for name in graph.outputs]})
    return digest.hexdigest()


def _tensor(tensor: Any) -> dict[str, Any]:
    return {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}


def _is_tensor(parameter: str) -> bool:
    return parameter in ("mask", "key_value_lengths", "query_lengths")
