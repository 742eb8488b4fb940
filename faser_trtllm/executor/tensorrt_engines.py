"""Opens the engines of a TensorRT engine directory: on a GPU, or interpreted on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.vendor import load_tensorrt
from faser_trtllm.builder.plan_file import PlanFile
from faser_trtllm.builder.source import Source, open_sources
from faser_trtllm.builder.tensorrt_engine import TensorRTBackend
from faser_trtllm.core.decision import Mode
from faser_trtllm.engine.base import Engine
from faser_trtllm.errors import ConfigError, EngineFileError


@dataclass(frozen=True, slots=True)
class Interpretation:
    """The checkpoints that an engine directory was built from, to run its networks on the CPU."""

    checkpoint_dir: Path
    draft_checkpoint_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class OpenedEngines:
    """enter_mode: to be called between steps when the mode changes."""

    target: Engine
    draft: Engine | None
    enter_mode: Callable[[Mode], None]


def open_tensorrt_engines(
    engines: EngineDir,
    limits: BuildConfig,
    num_blocks: int,
    drafting: bool,
    interpretation: Interpretation | None,
    stack: ExitStack,
) -> OpenedEngines:
    """Open the target and, if drafting, the draft; closed with the stack.

    limits: what the executor asks for, at most what was built. num_blocks: KV blocks, where the caches are paged.
    Raises ConfigError where a GPU, its libraries or the checkpoints are missing, EngineFileError for engines that do
    not fit.
    """
    if interpretation is not None:
        return _interpreted(engines, drafting, interpretation, stack)
    return _on_gpu(engines, limits, num_blocks, drafting, stack)


def _on_gpu(
    engines: EngineDir, limits: BuildConfig, num_blocks: int, drafting: bool, stack: ExitStack
) -> OpenedEngines:
    from faser_trtllm.engine.tensorrt import TensorRTEngine
    from faser_trtllm.engine.tensorrt_device import Device, GpuPartition

    try:
        trt = load_tensorrt(engines.backend)
        device = stack.enter_context(Device())
    except ConfigError as error:
        raise ConfigError(
            f"{engines.path} holds {engines.backend} engines, which run on an NVIDIA GPU, and {error}; without one, "
            "faser generate --interpret runs a tensorrt_rtx engine's networks on the CPU"
        ) from error

    def open_engine(path: Path, name: str) -> Engine:
        stream = device.create_stream()
        stack.callback(device.destroy_stream, stream)
        with PlanFile.open(path) as file:
            is_linear, built = file.segments[0].info.flavour == "native", file.network
        return stack.enter_context(
            TensorRTEngine.open(
                path,
                trt,
                device,
                GpuPartition(name, stream),
                num_blocks=built.max_batch_size if is_linear else num_blocks,
                max_batch_size=limits.max_batch_size,
                max_num_tokens=limits.max_num_tokens,
                max_seq_len=limits.max_seq_len,
                max_logit_rows=limits.max_batch_size * (1 + limits.max_draft_len),
                cache_dir=_cache_dir(),
            )
        )

    target = open_engine(engines.target_path, "target")
    draft = open_engine(engines.draft_path, "draft") if drafting else None
    # The streams are the engines' own, so the lanes overlap as they are; the GPU divides itself between them.
    return OpenedEngines(target, draft, lambda mode: None)


def _interpreted(engines: EngineDir, drafting: bool, interpretation: Interpretation, stack: ExitStack) -> OpenedEngines:
    if engines.backend != "tensorrt_rtx":
        raise ConfigError(
            f"backend is {engines.backend} in {engines.path}, only engines of tensorrt_rtx can be interpreted; "
            "leave --interpret out"
        )
    trt = load_tensorrt(engines.backend)
    with ExitStack() as checkpoints:
        sources = _same_sources(engines, interpretation, drafting, checkpoints)
        _check_networks(engines, sources)
        opened = [stack.enter_context(_interpreted_engine(trt, engines, source)) for source in sources]
    return OpenedEngines(opened[0], opened[1] if drafting else None, lambda mode: None)


def _interpreted_engine(trt: Any, engines: EngineDir, source: Source) -> Any:
    from faser_trtllm.engine.interpreted import InterpretedEngine

    options = _network_options(engines, source.role)
    return InterpretedEngine(trt, source.config, source.weights, options, source.segments[1:-1])


def _same_sources(engines: EngineDir, interpretation: Interpretation, drafting: bool, stack: ExitStack) -> list[Source]:
    """The checkpoints, if they are those of the manifest."""
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
                f"{different} of the {source.role} checkpoint {source.directory} is not the one that {engines.path} "
                "was built from; give that checkpoint, or rebuild with faser build"
            )
    return sources


def _check_networks(engines: EngineDir, sources: list[Source]) -> None:
    backend = TensorRTBackend.load(engines.backend, str(engines.manifest["dtype"]), ())
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


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "faser_trtllm" / "tensorrt"
