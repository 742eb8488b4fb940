"""The TensorRT backends of `faser build`: one plan per segment of a model, built in sequence into one file.

TensorRT for RTX builds ahead of time on any machine; full TensorRT builds for the GPU that it runs on. Other
differences are detected by what the module offers (plugins or native attention, flags), not by its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from faser_trtllm.backends import find_backend
from faser_trtllm.builder.backend import Progress, paged_block_size
from faser_trtllm.builder.build_monitor import PhaseProgress, run_builder
from faser_trtllm.builder.cuda_engine import CudaBackend
from faser_trtllm.builder.engine_dir import BuildConfig
from faser_trtllm.builder.network.early_exit import build_early_exit
from faser_trtllm.builder.network.fp8 import BlankLayers, CheckpointLayers, Fp8Layers, is_layers
from faser_trtllm.builder.network.fp8_recipe import Fp8Recipe
from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.segment import SegmentNetwork, build_segment
from faser_trtllm.builder.network.vendor import create_network, load_tensorrt, logger, rtx_refusal
from faser_trtllm.builder.options import BuildOptions, fp8_roles
from faser_trtllm.builder.plan_file import (
    EARLY_EXIT,
    SEGMENT,
    VERSION,
    PlanFileWriter,
    PlanInfo,
    Range,
    Requirements,
    arch_capability,
    describe,
)
from faser_trtllm.builder.source import Source
from faser_trtllm.core.request import NUM_CANDIDATES
from faser_trtllm.errors import ConfigError, FaserError, InvalidArgumentError
from faser_trtllm.models.calibration import calibration_text
from faser_trtllm.models.heads.head import BlockDrafter
from faser_trtllm.models.quantized_weight import FP8
from faser_trtllm.models.weights import expected_shapes

VERIFY_ROWS = 128
"""Rows of the optimization profile for verification; prompts use the one with max_num_tokens rows."""

RTX_COMPUTE_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0")
"""Default targets of TensorRT for RTX 1.7: these GPUs and newer ones (its documentation on CPU engines)."""

RTX_FP8_CAPABILITIES = ("8.9", "12.0")
"""Default targets of networks in fp8, which TensorRT for RTX refuses to build for older GPUs."""


class TensorRTBackend:
    """The EngineBuilder of both TensorRT modules."""

    def __init__(
        self,
        trt: Any,
        name: str,
        dtype: str,
        requirements: Requirements,
        portable_build: bool,
        fp8: Fp8Recipe | None = None,
    ) -> None:
        self._trt = trt
        self._name = name
        self._dtype = dtype
        self._requirements = requirements
        self._fp8 = fp8 or Fp8Recipe()
        self._input_scales: dict[str, dict[str, float]] = {}  # by role, once they are known
        self._set_compute_capabilities = not portable_build
        self._has_plugins = hasattr(trt.INetworkDefinition, "add_plugin")
        self._heads = CudaBackend(dtype)  # draft heads always run on torch and our kernels

    @classmethod
    def load(
        cls, name: str, dtype: str, compute_capabilities: Sequence[str], fp8: Fp8Recipe | None = None
    ) -> TensorRTBackend:
        """Import tensorrt or tensorrt_rtx; ConfigError if that fails, InvalidArgumentError for unsupported GPUs."""
        fp8 = fp8 or Fp8Recipe()
        trt = load_tensorrt(name)
        version = str(trt.__version__)
        if name == "tensorrt":
            from faser_trtllm.ops.cuda.compiler import check_driver
            from faser_trtllm.ops.cuda.driver import device_arch, driver_version

            check_driver(driver_version())
            arch = device_arch()  # full TensorRT times kernels on the GPU that it builds for
            if hasattr(trt.INetworkDefinition, "add_plugin"):
                from faser_trtllm.builder.plugins import register

                register(trt, arch)
            fp8.check_capability(arch_capability(arch))
            requirements = Requirements(name, version, (arch_capability(arch),), portable=False)
            return cls(trt, name, dtype, requirements, portable_build=True, fp8=fp8)
        if not compute_capabilities:
            capabilities = RTX_FP8_CAPABILITIES if fp8.roles else RTX_COMPUTE_CAPABILITIES
            return cls(trt, name, dtype, Requirements(name, version, capabilities, True), True, fp8)
        supported = _supported_capabilities(trt)
        for capability in compute_capabilities:
            if capability not in supported:
                raise InvalidArgumentError(
                    f"compute_capability has {capability}, {name} {version} builds for {', '.join(supported)}; "
                    "leave it out for all of its default GPUs"
                )
            fp8.check_capability(capability)
        return cls(trt, name, dtype, Requirements(name, version, tuple(compute_capabilities), False), False, fp8)

    def tokens_per_block(self, wanted: int | None, max_seq_len: int) -> int:
        if self._has_plugins:
            return paged_block_size(wanted)
        if wanted not in (None, max_seq_len):
            raise InvalidArgumentError(
                f"tokens_per_block is {wanted}, {self._name} keeps each request's KV in one block of max_seq_len "
                f"({max_seq_len}); leave it out"
            )
        return max_seq_len

    def identity(self, sources: Sequence[Source], build_config: BuildConfig) -> dict[str, Any]:
        """Create every network, one segment at a time, without building it, and hash its definition."""
        networks = [source for source in sources if source.head is None]
        heads = [source for source in sources if source.head is not None]
        for source in networks:
            if source.config.experts is not None:
                raise InvalidArgumentError(
                    f"the {source.role} is a mixture of experts, for which TensorRT has a layer on compute capability "
                    "10.x only and our networks none; use --backend cuda or --backend cpu"
                )
        quantized = {source.role: self._quantization(source) for source in sources if self._is_fp8(source)}
        entries: dict[str, Any] = {"quantization": quantized} if quantized else {}
        if heads:
            self._check_heads(heads, build_config)
            entries |= self._heads.identity(heads, build_config)
            entries["head_file_version"] = entries["engine_file_version"]
        return entries | {
            "engine_file_version": VERSION,
            "requirements": _plain(asdict(self._requirements)),
            "specifications": {source.role: self._specifications(source, build_config) for source in networks},
        }

    def engine_config(self, source: Source, build_config: BuildConfig) -> dict[str, Any]:
        if source.head is not None:
            return self._heads.engine_config(source, build_config)
        entries = {
            "requirements": _plain(asdict(self._requirements)),
            "network": _plain(asdict(self._options(source, build_config))),
        }
        if self._is_fp8(source):
            entries["quantization"] = self._quantization(source) | {"input_scales": self._scales(source)}
        return entries

    def min_bytes(self, source: Source, build_config: BuildConfig) -> int:
        if source.head is not None:
            return self._heads.min_bytes(source, build_config)
        itemsize = 4 if self._dtype == "float32" else 2
        is_fp8 = self._is_fp8(source)
        return sum(
            (1 if is_fp8 and is_layers(name, shape) else itemsize) * math.prod(shape)
            for name, shape in expected_shapes(source.config).items()
        )

    def write_engine(self, path: Path, source: Source, build_config: BuildConfig, progress: Progress | None) -> None:
        if source.head is not None:
            self._heads.write_engine(path, source, build_config, progress)
            return
        options = self._options(source, build_config)
        parts = self._parts(source)
        fp8 = CheckpointLayers(source.weights, self._scales(source)) if self._is_fp8(source) else None
        with PlanFileWriter(path, self._requirements, options) as writer:
            for done, (kind, first, last) in enumerate(parts):
                builder = self._trt.Builder(logger(self._trt))
                network = self._network(builder, kind, first, last, source, options, fp8)
                info, config = self._configure(builder, network, kind, first, last)

                def report(fraction: float, phase: str, done: int = done, info: PlanInfo = info) -> None:
                    if progress is not None:
                        thousandths = int(1000 * (done + fraction))
                        progress(source.role, thousandths, 1000 * len(parts), f"{describe(info)}: {phase}")

                plan = self._build(builder, network, config, info, report)
                # Free the weights before the plan is written, and the plan before the next segment's weights are read.
                del network, config, builder
                writer.add(info, memoryview(plan))
                del plan
        if progress is not None:
            progress(source.role, 1000 * len(parts), 1000 * len(parts), "written")

    def _check_heads(self, heads: Sequence[Source], build_config: BuildConfig) -> None:
        for source in heads:
            if isinstance(source.head, BlockDrafter):
                raise InvalidArgumentError(
                    f"the {source.role} is {source.head}, which copies a request's last KV block each time it drafts, "
                    f"and one of {self._name} may hold a whole request; use --backend cpu or cuda"
                )
        dtypes = find_backend("cuda").dtypes
        if self._dtype not in dtypes:
            raise InvalidArgumentError(
                f"dtype is {self._dtype}, draft heads run in {' or '.join(dtypes)}; use one of them"
            )
        if build_config.tokens_per_block % 16:
            raise InvalidArgumentError(
                f"max_seq_len is {build_config.max_seq_len}, with a draft head {self._name} needs a multiple of 16"
            )

    def _options(self, source: Source, build_config: BuildConfig) -> NetworkOptions:
        rows = build_config.max_num_tokens
        return NetworkOptions(
            dtype=self._dtype,
            max_batch_size=build_config.max_batch_size,
            max_num_tokens=rows,
            max_seq_len=build_config.max_seq_len,
            tokens_per_block=build_config.tokens_per_block,
            max_query_rows=min(rows, build_config.max_seq_len),
            num_candidates=NUM_CANDIDATES,
            profile_rows=(VERIFY_ROWS,) if rows > VERIFY_ROWS else (),
            read_layers=source.read_layers,
        )

    def _parts(self, source: Source) -> list[tuple[str, int, int]]:
        """Return (kind, first, last) of each plan in a model's file, in order; `last` is exclusive."""
        parts = [(SEGMENT, first, last) for first, last in pairwise(source.segments)]
        return [*parts, (EARLY_EXIT, 0, source.config.num_layers)] if len(parts) > 1 else parts

    def _specifications(self, source: Source, build_config: BuildConfig) -> list[str]:
        options = self._options(source, build_config)
        fp8 = BlankLayers(source.weights) if self._is_fp8(source) else None  # the specification has no values
        # Free each network with its weights before creating the next.
        return [
            self._network(self._trt.Builder(logger(self._trt)), *part, source, options, fp8).specification
            for part in self._parts(source)
        ]

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
        network = create_network(self._trt, builder)
        if kind == EARLY_EXIT:
            return build_early_exit(self._trt, network, source.config, source.weights, options)
        return build_segment(self._trt, network, source.config, source.weights, first, last, options, fp8)

    def _is_fp8(self, source: Source) -> bool:
        return source.role in self._fp8.roles

    def _scales(self, source: Source) -> dict[str, float]:
        if source.role not in self._input_scales:
            tokenizer = source.checkpoint.tokenizer
            self._input_scales[source.role] = self._fp8.input_scales(source.config, source.weights, tokenizer)
        return self._input_scales[source.role]

    def _quantization(self, source: Source) -> dict[str, Any]:
        if source.head is not None:
            raise InvalidArgumentError(
                f"{source.role}_quantization is {FP8}, but the {source.role} is {source.head}, which stays in 16 "
                "bits; leave it out"
            )
        return self._fp8.identity(source.config, source.weights)

    def _configure(
        self, builder: Any, network: SegmentNetwork, kind: str, first: int, last: int
    ) -> tuple[PlanInfo, Any]:
        trt = self._trt
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.max_aux_streams = 0  # a segment must run entirely on the partition's stream
        if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # stream capture needs it
        if self._set_compute_capabilities:
            capabilities = self._requirements.compute_capabilities
            config.num_compute_capabilities = len(capabilities)
            for index, capability in enumerate(capabilities):
                config.set_compute_capability(getattr(trt.ComputeCapability, _enum_name(capability)), index)
        profiles = network.profiles(builder)
        for profile in profiles:
            config.add_optimization_profile(profile)
        dynamic = [spec.name for spec in network.inputs if spec.is_dynamic]
        info = PlanInfo(
            kind=kind,
            first=first,
            last=last,
            flavour=network.flavour,
            specification=network.specification,
            inputs=network.inputs,
            outputs=network.outputs,
            plugins=network.plugins,
            profiles=tuple({name: _range(profile, name) for name in dynamic} for profile in profiles),
        )
        return info, config

    def _build(self, builder: Any, network: SegmentNetwork, config: Any, info: PlanInfo, report: PhaseProgress) -> Any:
        """Return the plan, an IHostMemory."""
        messages = logger(self._trt)
        messages.errors.clear()
        plan = run_builder(self._trt, config, lambda: builder.build_serialized_network(network.network, config), report)
        if plan is None:
            reason = messages.errors[-1] if messages.errors else "it gave no reason"
            raise FaserError(
                f"{self._name} {self._requirements.tensorrt_version} could not build {describe(info)}: {reason}"
            )
        return plan


def open_builder(options: BuildOptions) -> TensorRTBackend:
    """Return the builder of either TensorRT backend; see TensorRTBackend.load.

    ConfigError if TensorRT for RTX refuses this machine's GPU, unless the build is for other GPUs.
    """
    if options.backend == "tensorrt_rtx":
        _check_rtx_gpus(options.compute_capabilities)
    roles = fp8_roles(options)
    fp8 = Fp8Recipe(roles, calibration_text(options.calib_dataset)) if roles else Fp8Recipe()
    return TensorRTBackend.load(options.backend, options.dtype, options.compute_capabilities, fp8)


def _check_rtx_gpus(asked: Sequence[str]) -> None:
    """Raise ConfigError or InvalidArgumentError for refused GPUs, before anything is imported or built."""
    from faser_trtllm.ops.cuda.driver import device_arch, device_name

    for capability in asked:
        if refusal := rtx_refusal(capability):
            raise InvalidArgumentError(
                f"compute_capability has {capability}, and {refusal}; use --backend cuda or tensorrt for it"
            )
    if asked:
        return
    try:
        capability, name = arch_capability(device_arch()), device_name()
    except ConfigError:  # no GPU here: plans are for another machine
        return
    if refusal := rtx_refusal(capability):
        raise ConfigError(
            f"the GPU here, {name}, has compute capability {capability}, and {refusal}; use --backend cuda, or say "
            "which other GPUs it is for, as in --compute_capability 8.9"
        )


def _enum_name(capability: str) -> str:
    return "SM" + capability.replace(".", "")


def _supported_capabilities(trt: Any) -> list[str]:
    numbers = [name.removeprefix("SM") for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    return [f"{number[:-1]}.{number[-1]}" for number in sorted(numbers, key=int)]


def _range(profile: Any, name: str) -> Range:
    smallest, expected, largest = (tuple(shape) for shape in profile.get_shape(name))
    return smallest, expected, largest


def _plain(value: Any) -> Any:
    """Convert to JSON and back, so that the value equals one that is read from a manifest."""
    return json.loads(json.dumps(value))
