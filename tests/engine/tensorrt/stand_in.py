"""Stands in for TensorRT's runtime: the engine is the real one, its plans run in the CPU interpreter: at once, or as
the virtual GPU's streams have it.

It takes its rules from TensorRT's documentation: a context has a profile, scratch memory and every shape and address
before it runs, shapes lie within the profile, and caches are updated in place. Its own rule is the engine's promise: a
context that has run keeps its shapes, addresses and stream.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.segment import SegmentNetwork
from faser_trtllm.builder.plan_file import (
    EARLY_EXIT,
    SEGMENT,
    Plan,
    PlanFile,
    PlanFileWriter,
    PlanInfo,
    Requirements,
    describe,
)
from lab.interpreted.interpreter import Interpreter

VERSION = "1.7.1.116"
CAPABILITY = "8.9"


class StandInTrt:
    """The module tensorrt_rtx with another Runtime; everything else is the real module's. log: what is gone, in
    order.

    interpret(plan): its description and interpreter; None if it is no plan. enqueue(stream, work, label): on a device.
    check_memory(tensor, address, num_bytes): raises where that is no memory.
    """

    def __init__(
        self,
        trt: Any,
        interpret: Callable[[bytes], tuple[PlanInfo, Interpreter] | None],
        enqueue: Callable[[int, Callable[[], None], str], None] = lambda stream, work, label: work(),
        check_memory: Callable[[str, int, int], None] = lambda name, address, num_bytes: None,
        name: str = "tensorrt_rtx",
        version: str = VERSION,
    ) -> None:
        self._trt = trt
        self.__name__ = name
        self.__version__ = version
        self.log: list[str] = []
        self.interpret = interpret
        self.enqueue = enqueue
        self.check_memory = check_memory
        self.validity = (trt.EngineValidity.VALID, 0)
        self.extra_tensor = ""  # of a plan that is not what the table says
        self.contexts: list[Any] = []  # weak references
        self.saved: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trt, name)

    def Runtime(self, logger: Any) -> Any:  # noqa: N802
        return _Runtime(self)


class _Runtime:
    def __init__(self, trt: StandInTrt) -> None:
        self._trt = trt
        weakref.finalize(self, trt.log.append, "runtime")

    def get_engine_validity(self, view: memoryview) -> tuple[Any, int]:
        return self._trt.validity

    def deserialize_cuda_engine(self, view: memoryview) -> Any:
        found = self._trt.interpret(bytes(view))
        return None if found is None else _Engine(self._trt, *found)


class _Engine:
    def __init__(self, trt: StandInTrt, info: PlanInfo, interpreter: Interpreter) -> None:
        self._trt = trt
        self.info = info
        self.interpreter = interpreter
        names = [spec.name for spec in (*info.inputs, *info.outputs)]
        self._names = [*names, trt.extra_tensor] if trt.extra_tensor else names
        weakref.finalize(self, trt.log.append, "engine")

    @property
    def num_io_tensors(self) -> int:
        return len(self._names)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.info.profiles)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return 1024 * (1 + profile) + 64 * self.info.last

    def create_runtime_config(self) -> Any:
        return _RuntimeConfig(self._trt)

    def create_execution_context(self, config: Any) -> Any:
        assert config.strategy == self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        assert config.cuda_graph_strategy == self._trt.CudaGraphStrategy.DISABLED
        return _Context(self._trt, self, config)


class _RuntimeConfig:
    def __init__(self, trt: StandInTrt) -> None:
        self._trt = trt
        self.cuda_graph_strategy: Any = None
        self.dynamic_shapes_kernel_specialization_strategy: Any = None
        self.strategy: Any = None
        self.cache: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> Any:
        return _Cache(self._trt)

    def set_runtime_cache(self, cache: Any) -> None:
        self.cache = cache


class _Cache:
    def __init__(self, trt: StandInTrt) -> None:
        self._trt = trt
        self.content = b""

    def deserialize(self, blob: bytes) -> bool:
        self.content = bytes(blob)
        self._trt.saved.append(self.content)
        return True

    def serialize(self) -> bytes:
        return self.content + b"compiled "


class _Context:
    def __init__(self, trt: StandInTrt, engine: _Engine, config: Any) -> None:
        self._trt = trt
        self._engine = engine
        self.config = config
        self.scratch: tuple[int, int] | None = None
        self.profile = -1
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self.stream: int | None = None  # that it runs on
        weakref.finalize(self, trt.log.append, "context")
        trt.contexts.append(weakref.ref(self))

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        assert 0 <= profile < len(self._engine.info.profiles)
        self.profile = profile
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        needed = self._engine.get_device_memory_size_for_profile_v2(self.profile)
        assert size >= needed
        self.scratch = (address, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.stream is None, "a context changes its shapes"
        assert all(type(size) is int for size in shape)
        smallest, _, largest = self._engine.info.profiles[self.profile][name]
        self.shapes[name] = shape
        return all(low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert self.stream is None, "a context changes its addresses"
        assert type(address) is int
        assert address > 0
        self._addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        dynamic = {spec.name for spec in self._engine.info.inputs if spec.is_dynamic}
        every = {spec.name for spec in (*self._engine.info.inputs, *self._engine.info.outputs)}
        return sorted((dynamic - self.shapes.keys()) | (every - self._addresses.keys()))

    def execute_async_v3(self, stream: int) -> bool:
        assert self.scratch is not None
        assert self.stream in (None, stream), "a context runs on two streams"
        self.stream = stream
        info, shapes, addresses = self._engine.info, self.shapes, self._addresses
        for spec in info.outputs:
            if "_cache_out_" in spec.name:
                assert addresses[spec.name] == addresses[spec.name.replace("_out", "")], "caches are updated in place"
        interpreter = self._engine.interpreter

        label = f"plan of {describe(info)}"

        def bound(name: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
            num_bytes = int(np.prod(shape)) * getattr(torch, dtype).itemsize
            self._trt.check_memory(f"{name} of the {label}", addresses[name], num_bytes)
            return _tensor(addresses[name], shape, dtype)

        def run() -> None:
            feeds = {spec.name: bound(spec.name, shapes.get(spec.name, spec.shape), spec.dtype) for spec in info.inputs}
            for name, value in interpreter.run(feeds).items():
                if "_cache_out_" not in name:
                    dtype = next(spec.dtype for spec in info.outputs if spec.name == name)
                    bound(name, tuple(value.shape), dtype).copy_(value)

        self._trt.enqueue(stream, run, label)
        return True


def _tensor(address: int, shape: Sequence[Any], dtype: str) -> torch.Tensor:
    """Memory as a tensor, not copied."""
    kind = getattr(torch, dtype)
    size = int(np.prod(shape)) * kind.itemsize
    buffer = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(buffer, dtype=kind).reshape(tuple(shape))


@dataclass(frozen=True)
class StandIn:
    """A plan file, and the module to open it with."""

    path: Path
    trt: StandInTrt


def make_stand_in(
    path: Path,
    trt: Any,
    networks: Sequence[tuple[SegmentNetwork, Sequence[Any]]],
    options: NetworkOptions,
    segments: Sequence[int],
    requirements: Requirements | None = None,
) -> StandIn:
    """Write a plan file whose plans are names, for networks (with plugin nodes) of segments and the early exit."""
    interpreters: dict[bytes, tuple[PlanInfo, Interpreter]] = {}
    requirements = requirements or Requirements("tensorrt_rtx", VERSION, (CAPABILITY,), portable=False)
    with PlanFileWriter(path, requirements, options) as writer:
        for number, (network, plugin_nodes) in enumerate(networks):
            is_exit = number == len(segments) - 1
            first, last = (0, segments[-1]) if is_exit else segments[number : number + 2]
            info = plan_info(network, EARLY_EXIT if is_exit else SEGMENT, first, last)
            plan = f"plan of {network.name} {number}".encode()
            writer.add(info, memoryview(plan))
            interpreters[plan] = (info, Interpreter(trt, network.network, network.weights, plugin_nodes))
    return StandIn(path, StandInTrt(trt, interpreters.get))


def plan_info(network: SegmentNetwork, kind: str, first: int, last: int) -> PlanInfo:
    """Return what a plan file records about the plan of a network."""
    options = network.options
    return PlanInfo(
        kind=kind,
        first=first,
        last=last,
        flavour=network.flavour,
        specification=network.specification,
        inputs=network.inputs,
        outputs=network.outputs,
        plugins=network.plugins,
        profiles=tuple(_profile(network, limit) for limit in (*options.profile_rows, options.max_num_tokens)),
    )


def _profile(network: SegmentNetwork, max_rows: int) -> dict[str, Any]:
    ranges = network.options.dimension_ranges(max_rows)
    return {
        spec.name: tuple(
            tuple(ranges[size][i] if isinstance(size, str) else size for size in spec.shape) for i in range(3)
        )
        for spec in network.inputs
        if spec.is_dynamic
    }


def plans_of(path: Path) -> tuple[Plan, ...]:
    with PlanFile.open(path) as file:
        return file.plans
