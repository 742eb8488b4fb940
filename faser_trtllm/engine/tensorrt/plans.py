"""Deserialize, check and run the plans of one engine file, with their contexts and scratch memory. Not run on a GPU."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faser_trtllm.builder.network.vendor import logger
from faser_trtllm.builder.plan_file import Plan, PlanFile, Requirements, describe
from faser_trtllm.errors import EngineFileError, FaserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PassShape:
    """A pass's rows, with dummies, and an upper bound on the rows of one request. Equal shapes share a context."""

    rows: int
    query_rows: int


class Plans:
    """Deserialized plans, in the file's order, and an execution context per plan, PassShape and stream.

    A context is bound once and keeps its shapes: TensorRT updates internal state when shapes change, which must not be
    captured, and contexts that change shape have leaked modules of AOT plugins (NVIDIA/TensorRT issue 4849). Contexts
    share one block of scratch memory, since the plans of an engine run in sequence. cache_dir: where TensorRT for RTX
    keeps the kernels that it compiles for this GPU; None: nowhere. Raises EngineFileError if the file does not fit this
    GPU or this TensorRT.
    """

    def __init__(
        self, trt: Any, file: PlanFile, compute_capability: str, device: torch.device, cache_dir: Path | None = None
    ) -> None:
        import torch

        self._trt = trt
        self._compute_capability = compute_capability
        self._cache_dir = cache_dir
        self._file = file
        self._engines: list[Any] = []
        self._contexts: dict[tuple[int, PassShape, int], Any] = {}
        self._caches: dict[int, Any] = {}
        self._scratch: Tensor | None = None
        self._runtime: Any = None
        check_requirements(file.label, file.requirements, trt, compute_capability)
        try:
            self._runtime = trt.Runtime(logger(trt))
            self._engines = [self._deserialize(plan) for plan in file.plans]
            num_bytes = max(self._scratch_bytes(engine) for engine in self._engines)
            self._scratch = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=device)
        except BaseException:
            self.close()
            raise

    def run(self, index: int, shape: PassShape, stream: int, bind: Callable[[], Mapping[str, Tensor]]) -> None:
        """Enqueue plan `index` on a stream. bind(): returns all inputs and outputs of a pass of this shape; called the
        first time, when TensorRT for RTX also compiles kernels."""
        key = (index, shape, stream)
        context = self._contexts.get(key)
        if context is None:
            context = self._contexts[key] = self._create_context(index, shape, stream, bind())
        if not context.execute_async_v3(stream):
            raise FaserError(f"{self._name(index)} did not run ({self._last_error()})")

    def save_caches(self) -> None:
        """Save compiled kernels for the next start. Failure is not an error."""
        for index, cache in self._caches.items():
            path = self._cache_path(index)
            staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                staging.write_bytes(memoryview(cache.serialize()))
                os.replace(staging, path)

    def close(self) -> None:
        """Close contexts before engines, engines before the runtime, memory last. Idempotent."""
        self._contexts.clear()
        self._caches.clear()
        self._engines.clear()
        self._runtime = None
        self._scratch = None

    def _deserialize(self, plan: Plan) -> Any:
        label = f"{self._file.label}: the plan of {describe(plan.info)}"
        view = self._file.view(plan)
        try:
            if hasattr(self._runtime, "get_engine_validity"):
                _check_validity(self._trt, self._runtime, view, label)
            logger(self._trt).errors.clear()
            engine = self._runtime.deserialize_cuda_engine(view)
        finally:
            view.release()
        if engine is None:
            raise EngineFileError(f"{label} cannot be deserialized ({self._last_error()}); rebuild it with faser build")
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        wanted = {spec.name for spec in (*plan.info.inputs, *plan.info.outputs)}
        if found != wanted:
            raise EngineFileError(
                f"{label} has other inputs and outputs than its engine file lists "
                f"({', '.join(sorted(found ^ wanted))}); rebuild it with faser build"
            )
        return engine

    def _create_context(self, index: int, shape: PassShape, stream: int, tensors: Mapping[str, Tensor]) -> Any:
        limits = (*self._file.network.profile_rows, self._file.network.max_num_tokens)
        profile = next(number for number, limit in enumerate(limits) if shape.rows <= limit)
        context = self._new_context(index, profile)
        if context is None or not context.set_optimization_profile_async(profile, stream):
            raise FaserError(f"{self._name(index)}: no execution context ({self._last_error()})")
        assert self._scratch is not None
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        info = self._file.plans[index].info
        for spec in info.inputs:
            size = tuple(tensors[spec.name].shape)
            fixed = (got == want for got, want in zip(size, spec.shape, strict=True) if isinstance(want, int))
            if not all(fixed):
                raise FaserError(f"{self._name(index)}: {spec.name} is {list(size)}, it was built as {spec.shape}")
            if spec.is_dynamic and not context.set_input_shape(spec.name, size):
                raise FaserError(f"{self._name(index)}: {spec.name} cannot be {list(size)} ({self._last_error()})")
        for spec in (*info.inputs, *info.outputs):
            if not context.set_tensor_address(spec.name, tensors[spec.name].data_ptr()):
                raise FaserError(f"{self._name(index)}: {spec.name} cannot be bound ({self._last_error()})")
        missing = context.infer_shapes()
        if missing:
            raise FaserError(f"{self._name(index)}: {', '.join(missing)} has no shape or address")
        return context

    def _new_context(self, index: int, profile: int) -> Any:
        trt, engine = self._trt, self._engines[index]
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(engine, "create_runtime_config"):
            return engine.create_execution_context(strategy)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        if hasattr(config, "cuda_graph_strategy"):
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # our engine captures graphs
        if hasattr(config, "dynamic_shapes_kernel_specialization_strategy"):
            # There are few shapes, and a captured graph's kernels must not be swapped.
            kinds = trt.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER
        if hasattr(config, "create_runtime_cache") and self._cache_dir is not None:
            config.set_runtime_cache(self._cache(index, config.create_runtime_cache))
        return engine.create_execution_context(config)

    def _cache(self, index: int, create: Callable[[], Any]) -> Any:
        if index not in self._caches:
            cache = create()
            with contextlib.suppress(OSError):
                cache.deserialize(self._cache_path(index).read_bytes())  # stays empty for another GPU's file
            self._caches[index] = cache
        return self._caches[index]

    def _cache_path(self, index: int) -> Path:
        assert self._cache_dir is not None
        plan = self._file.plans[index]
        return self._cache_dir / f"{plan.sha256[:32]}-{self._compute_capability}.cache"

    def _scratch_bytes(self, engine: Any) -> int:
        return max(
            int(engine.get_device_memory_size_for_profile_v2(profile))
            for profile in range(engine.num_optimization_profiles)
        )

    def _name(self, index: int) -> str:
        return f"{self._file.label}: {describe(self._file.plans[index].info)}"

    def _last_error(self) -> str:
        errors = logger(self._trt).errors
        return errors[-1] if errors else "TensorRT gave no reason"


def check_requirements(label: str, needs: Requirements, trt: Any, compute_capability: str) -> None:
    """Raise EngineFileError unless this TensorRT and a GPU of this compute capability can run the file."""
    name, version = trt.__name__, str(trt.__version__)
    if (needs.backend, needs.tensorrt_version) != (name, version):
        raise EngineFileError(
            f"{label} was built with {needs.backend} {needs.tensorrt_version}, here is {name} {version}; rebuild it "
            f"with faser build --backend {needs.backend}, or install that version"
        )
    # A portable plan may run on GPUs that it does not name, which get_engine_validity finds out from its header.
    if compute_capability not in needs.compute_capabilities and not needs.portable:
        remedy = f"--compute_capability {compute_capability}" if needs.backend == "tensorrt_rtx" else "on this machine"
        raise EngineFileError(
            f"{label} was built for compute capability {', '.join(needs.compute_capabilities)}, this GPU has "
            f"{compute_capability}; rebuild it with faser build {remedy}"
        )


def _check_validity(trt: Any, runtime: Any, view: memoryview, label: str) -> None:
    validity, diagnostics = runtime.get_engine_validity(view)
    if validity == trt.EngineValidity.INVALID:
        kinds = trt.EngineInvalidityDiagnostics.__members__.items()
        reasons = [name for name, bit in kinds if int(diagnostics) & int(bit)]
        raise EngineFileError(
            f"{label} does not run on this GPU ({', '.join(reasons) or 'no reason given'}); rebuild it with "
            "faser build, or use another backend"
        )
