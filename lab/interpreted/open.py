"""Open the networks of a TensorRT engine directory on the CPU."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.builder.network.fp8 import CheckpointLayers
from faser_trtllm.builder.network.fp8_recipe import Fp8Recipe, recorded_scales
from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.vendor import load_tensorrt
from faser_trtllm.builder.plan_file import PlanFile
from faser_trtllm.builder.source import Source, open_sources
from faser_trtllm.builder.tensorrt_engine import TensorRTBackend
from faser_trtllm.engine.opening import OpenedEngines, OpenRequest, check_request, cpu_sampler, stay
from faser_trtllm.errors import ConfigError, EngineFileError
from lab.interpreted.engine import InterpretedEngine

INTERPRETED = "tensorrt_rtx"
"""The backend whose networks are interpreted: plans of tensorrt need the GPU that they are for."""


@dataclass(frozen=True, slots=True)
class Interpretation:
    """An opener (engine/opening.py) that interprets a directory's networks on the CPU. It takes the weights from the
    checkpoints that the directory was built from."""

    checkpoint_dir: Path
    draft_checkpoint_dir: Path | None = None

    def __call__(self, request: OpenRequest, stack: ExitStack) -> OpenedEngines:
        """Open the engines; raise ConfigError for other backends or checkpoints, and errors like open_engines()."""
        backend = check_request(request)
        if backend.name != INTERPRETED:
            raise ConfigError(
                f"backend is {backend.name} in {request.engines.path}, only engines of {INTERPRETED} can be "
                "interpreted; leave --interpret out"
            )
        return _interpreted(request, self, stack)


def _interpreted(request: OpenRequest, interpretation: Interpretation, stack: ExitStack) -> OpenedEngines:
    engines, drafting = request.engines, request.drafting
    if drafting and engines.draft_head is not None:
        raise ConfigError(
            f"{engines.path} has a draft head, which runs on a GPU only; interpret it with --speculation off"
        )
    trt = load_tensorrt(engines.backend)
    with ExitStack() as checkpoints:
        sources = _same_sources(engines, interpretation, drafting, checkpoints)
        _check_networks(engines, sources)
        opened = [stack.enter_context(_interpreted_engine(trt, engines, source)) for source in sources]
    return OpenedEngines(opened[0], opened[1] if drafting else None, stay, cpu_sampler(request))


def _interpreted_engine(trt: Any, engines: EngineDir, source: Source) -> InterpretedEngine:
    options = _network_options(engines, source.role)
    config = engines.target_config if source.role == "target" else engines.draft_config
    scales = None if config is None else recorded_scales(config)
    fp8 = None if scales is None else CheckpointLayers(source.weights, scales)
    return InterpretedEngine(trt, source.config, source.weights, options, source.segments[1:-1], fp8)


def _same_sources(engines: EngineDir, interpretation: Interpretation, drafting: bool, stack: ExitStack) -> list[Source]:
    """Return the checkpoints if they are those of the manifest; raise ConfigError otherwise."""
    draft_dir = interpretation.draft_checkpoint_dir
    if drafting and draft_dir is None:
        raise ConfigError(
            f"draft_checkpoint_dir is missing, {engines.path} has a draft engine; give the draft's checkpoint or "
            "--speculation off"
        )
    manifest = engines.manifest
    sources = open_sources(
        interpretation.checkpoint_dir,
        draft_dir if drafting else None,
        int(manifest["expand"]),
        [int(layer) for layer in manifest["segments"][1:-1]],
        stack,
    )
    for source in sources:
        different = source.first_difference(manifest["checkpoints"][source.role])
        if different is not None:
            raise ConfigError(
                f"{different} of the {source.role} checkpoint {source.checkpoint.path} is not the one that "
                f"{engines.path} was built from; give that checkpoint, or rebuild with faser build"
            )
    return sources


def _check_networks(engines: EngineDir, sources: list[Source]) -> None:
    recipe = Fp8Recipe(frozenset(engines.manifest.get("quantization", {})))
    backend = TensorRTBackend.load(engines.backend, str(engines.manifest["dtype"]), (), recipe)
    # A target that is opened without its head does not know which layers the head reads.
    sources = [replace(sources[0], read_layers=engines.read_layers), *sources[1:]]
    made = backend.identity(sources, engines.build_config)["specifications"]
    for role, specifications in made.items():
        if specifications != engines.manifest["specifications"][role]:
            raise EngineFileError(
                f"the {role} of {engines.path} was built from other networks than this faser makes; rebuild it with "
                "faser build"
            )


def _network_options(engines: EngineDir, role: str) -> NetworkOptions:
    path = engines.target_path if role == "target" else engines.draft_path
    with PlanFile.open(path) as file:
        return file.network
