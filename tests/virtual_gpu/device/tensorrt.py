"""TensorRT on the virtual GPU: `tensorrt` with our plugins and `tensorrt_rtx`, each with a builder and a runtime.

A plan of this builder is the recipe of its network: the checkpoint and the layers. The runtime makes the network again
with the project's own builder and interprets it, in the order of the stream. Real: engine files, their checks, contexts
and bindings, and the network's definition. Stood in for: what TensorRT makes of it. Plugins are the kernels themselves,
emulated, or references where kernels do not take float32. Matrix products sum in float64, as torch's do here.

No machine runs these engines by mistake: they say that they need TensorRT of VERSION.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import TypeAdapter

from faser_trtllm.builder.network.early_exit import build_early_exit
from faser_trtllm.builder.network.fp8 import CheckpointLayers, Fp8Layers
from faser_trtllm.builder.network.fp8_recipe import Fp8Recipe
from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.segment import SegmentNetwork, build_segment
from faser_trtllm.builder.network.vendor import create_network, load_tensorrt, logger
from faser_trtllm.builder.options import BuildOptions, fp8_roles
from faser_trtllm.builder.plan_file import EARLY_EXIT, PlanInfo, Requirements
from faser_trtllm.builder.source import Source, open_sources
from faser_trtllm.builder.tensorrt_engine import TensorRTBackend
from faser_trtllm.models.calibration import calibration_text
from lab.interpreted.interpreter import Interpreter, PluginNode
from tests.engine.tensorrt.stand_in import StandInTrt, plan_info
from tests.support.plugin_stand_in import StandInNetwork
from tests.support.plugin_stand_in import StandInTrt as PluginTrt
from tests.virtual_gpu.device import plugins
from tests.virtual_gpu.device.library import driver
from tests.virtual_gpu.device.streams import enqueue

VERSION = "0 (a stand-in for tests)"
CAPABILITY = "12.0"  # driver/partition.cpp


@functools.cache
def load(name: str) -> Any:
    """In place of builder.network.vendor.load_tensorrt, for what runs engines."""
    return StandInTrt(
        load_tensorrt("tensorrt_rtx"),
        functools.partial(_interpret, name),
        lambda stream, work, label: enqueue(work, label, stream),
        driver().check_memory,
        name,
        VERSION,
    )


def open_builder(options: BuildOptions) -> VirtualBackend:
    """In place of builder.tensorrt_engine.open_builder."""
    return VirtualBackend(options)


class VirtualBackend(TensorRTBackend):
    """The builder of both backends, up to where TensorRT would compile."""

    def __init__(self, options: BuildOptions) -> None:
        name = options.backend
        requirements = Requirements(name, VERSION, (CAPABILITY,), portable=False)
        roles = fp8_roles(options)
        fp8 = Fp8Recipe(roles, calibration_text(options.calib_dataset)) if roles else None
        super().__init__(_module(name), name, options.dtype, requirements, portable_build=True, fp8=fp8)
        self._recipe: dict[str, Any] = {
            "checkpoint_dir": str(options.checkpoint_dir.absolute()),
            "draft_checkpoint_dir": options.draft_checkpoint_dir and str(options.draft_checkpoint_dir.absolute()),
            "expand": options.expand,
            "exit_layers": list(options.exit_layers),
        }

    def _network(
        self,
        builder: Any,
        kind: str,
        first: int,
        last: int,
        source: Source,
        options: NetworkOptions,
        fp8: Fp8Layers | None,
    ) -> SegmentNetwork:
        self._recipe |= {"role": source.role, "kind": kind, "first": first, "last": last, "options": asdict(options)}
        self._recipe["input_scales"] = self._scales(source) if isinstance(fp8, CheckpointLayers) else None
        return _make_network(self._name, kind, first, last, source, options, fp8)[0]

    def _build(self, builder: Any, network: SegmentNetwork, config: Any, info: PlanInfo, report: Any) -> bytes:
        report(1.0, "written as a recipe")
        return json.dumps(self._recipe).encode()


@functools.cache
def _module(name: str) -> Any:
    """tensorrt_rtx as it is, or with plugins."""
    trt = load_tensorrt("tensorrt_rtx")
    if name == "tensorrt_rtx":
        return trt
    with_plugins = PluginTrt(trt)
    with_plugins.INetworkDefinition = SimpleNamespace(add_plugin=None)
    return with_plugins


def _make_network(
    name: str,
    kind: str,
    first: int,
    last: int,
    source: Source,
    options: NetworkOptions,
    fp8: Fp8Layers | None,
) -> tuple[SegmentNetwork, Sequence[PluginNode]]:
    trt = _module(name)
    network: Any = create_network(trt, trt.Builder(logger(trt)))
    if name == "tensorrt":
        network = StandInNetwork(network, source.config.num_heads, trt, plugins.functions(source.config.head_dim))
    made = (
        build_early_exit(trt, network, source.config, source.weights, options)
        if kind == EARLY_EXIT
        else build_segment(trt, network, source.config, source.weights, first, last, options, fp8)
    )
    return made, network.plugin_nodes() if name == "tensorrt" else ()


_open_checkpoints = ExitStack()  # weights point into their files


def _interpret(name: str, plan: bytes) -> tuple[PlanInfo, Interpreter] | None:
    try:
        recipe = json.loads(plan)
    except ValueError:
        return None
    draft = recipe["draft_checkpoint_dir"] if recipe["role"] == "draft" else None  # a target's may be a head
    sources = open_sources(
        Path(recipe["checkpoint_dir"]),
        draft and Path(draft),
        recipe["expand"],
        recipe["exit_layers"],
        _open_checkpoints,
    )
    source = next(source for source in sources if source.role == recipe["role"])
    options = TypeAdapter(NetworkOptions).validate_python(recipe["options"])
    kind, first, last = (recipe[key] for key in ("kind", "first", "last"))
    scales = recipe["input_scales"]
    fp8 = None if scales is None else CheckpointLayers(source.weights, scales)
    made, plugin_nodes = _make_network(name, kind, first, last, source, options, fp8)
    interpreter = Interpreter(load_tensorrt("tensorrt_rtx"), made.network, made.weights, plugin_nodes)
    return plan_info(made, kind, first, last), interpreter
