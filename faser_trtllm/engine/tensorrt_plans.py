"""The plans of one engine file on a GPU: deserialised, checked against it, and given contexts and scratch memory.

Not run on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from faser_trtllm.builder.network.vendor import logger
from faser_trtllm.builder.plan_file import Plan, PlanFile, Requirements, describe
from faser_trtllm.engine.tensorrt_device import Device, GpuPartition
from faser_trtllm.errors import EngineFileError, FaserError


class Plans:
    """Deserialised plans, in the file's order, and an execution context per plan, profile and partition.

    All contexts share one block of scratch memory: the plans of an engine run in sequence. cache_dir: where TensorRT
    for RTX keeps what it compiled for this GPU between two starts; None keeps nothing. Raises EngineFileError with what
    to rebuild where the file is not for this GPU or this TensorRT.
    """

    def __init__(self, trt: Any, file: PlanFile, device: Device, cache_dir: Path | None = None) -> None:
        self._trt = trt
        self._device = device
        self._cache_dir = cache_dir
        self._file = file
        self._engines: list[Any] = []
        self._contexts: dict[tuple[int, int, str], Any] = {}
        self._caches: dict[int, Any] = {}
        self._scratch = 0
        self._runtime: Any = None
        check_requirements(file.label, file.requirements, trt, device.compute_capability)
        try:
            self._runtime = trt.Runtime(logger(trt))
            self._engines = [self._deserialize(plan) for plan in file.plans]
            self.scratch_bytes = max(self._scratch_bytes(engine) for engine in self._engines)
            self._scratch = device.allocate(self.scratch_bytes)
        except BaseException:
            self.close()
            raise

    def profile(self, rows: int) -> int:
        """The first profile that takes so many rows."""
        limits = (*self._file.network.profile_rows, self._file.network.max_num_tokens)
        return next(index for index, limit in enumerate(limits) if rows <= limit)

    def context(self, index: int, profile: int, partition: GpuPartition) -> Any:
        """The context of plan `index`; made on first use, which compiles kernels on TensorRT for RTX."""
        key = (index, profile, partition.name)
        if key not in self._contexts:
            context = self._create_context(index, profile)
            if context is None or not context.set_optimization_profile_async(profile, partition.stream):
                raise FaserError(f"{self._name(index)}: no execution context ({self._last_error()})")
            context.set_device_memory(self._scratch, self.scratch_bytes)
            self._contexts[key] = context
        return self._contexts[key]

    def bind(
        self,
        index: int,
        profile: int,
        partition: GpuPartition,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
    ) -> None:
        """What enqueue() runs plan `index` on. shapes: of its inputs; addresses: of its inputs and outputs."""
        context = self.context(index, profile, partition)
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise FaserError(f"{self._name(index)}: {name} cannot be {list(shape)} ({self._last_error()})")
        for name, address in addresses.items():
            if not context.set_tensor_address(name, address):
                raise FaserError(f"{self._name(index)}: {name} cannot be bound ({self._last_error()})")
        missing = context.infer_shapes()
        if missing:
            raise FaserError(f"{self._name(index)}: {', '.join(missing)} has no shape or address")

    def enqueue(self, index: int, profile: int, partition: GpuPartition) -> None:
        """Run plan `index` on the partition's stream, as it was bound last."""
        if not self.context(index, profile, partition).execute_async_v3(partition.stream):
            raise FaserError(f"{self._name(index)} did not run ({self._last_error()})")

    def is_capturable(self, index: int, profile: int, partition: GpuPartition) -> bool:
        """Whether what enqueue() does can be recorded in a graph."""
        context = self.context(index, profile, partition)
        return not hasattr(context, "is_stream_capturable") or bool(context.is_stream_capturable(partition.stream))

    def save_caches(self) -> None:
        """Write what was compiled, so that the next start need not compile it. Failing to is no error."""
        for index, cache in self._caches.items():
            path = self._cache_path(index)
            staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                staging.write_bytes(memoryview(cache.serialize()))
                os.replace(staging, path)

    def close(self) -> None:
        """Contexts before engines, engines before the runtime, memory last. Closing twice is harmless."""
        self._contexts.clear()
        self._caches.clear()
        self._engines.clear()
        self._runtime = None
        if self._scratch:
            self._device.free(self._scratch)
            self._scratch = 0

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
            raise EngineFileError(f"{label} cannot be deserialised ({self._last_error()}); rebuild it with faser build")
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        wanted = {spec.name for spec in (*plan.info.inputs, *plan.info.outputs)}
        if found != wanted:
            raise EngineFileError(
                f"{label} has other inputs and outputs than the table says ({', '.join(sorted(found ^ wanted))}); "
                "rebuild it with faser build"
            )
        return engine

    def _create_context(self, index: int, profile: int) -> Any:
        trt, engine = self._trt, self._engines[index]
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(engine, "create_runtime_config"):
            return engine.create_execution_context(strategy)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        if hasattr(config, "cuda_graph_strategy"):
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # graphs are captured by the engine
        if hasattr(config, "dynamic_shapes_kernel_specialization_strategy"):
            # Buckets are few, and a kernel must not be swapped behind a captured graph's back; prompts have any shape.
            kinds = trt.DynamicShapesKernelSpecializationStrategy
            has_buckets = profile < len(self._file.network.profile_rows)
            config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER if has_buckets else kinds.NONE
        if hasattr(config, "create_runtime_cache") and self._cache_dir is not None:
            config.set_runtime_cache(self._cache(index, config.create_runtime_cache))
        return engine.create_execution_context(config)

    def _cache(self, index: int, create: Callable[[], Any]) -> Any:
        if index not in self._caches:
            cache = create()
            with contextlib.suppress(OSError):
                cache.deserialize(self._cache_path(index).read_bytes())  # refused if from another GPU: then it is empty
            self._caches[index] = cache
        return self._caches[index]

    def _cache_path(self, index: int) -> Path:
        assert self._cache_dir is not None
        plan = self._file.plans[index]
        return self._cache_dir / f"{plan.sha256[:32]}-{self._device.compute_capability}.cache"

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
    # Whether a portable plan runs on a GPU that it does not name, its own header tells (get_engine_validity).
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
