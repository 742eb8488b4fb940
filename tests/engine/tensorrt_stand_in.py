"""Stands in for a GPU and TensorRT's runtime: the engine is the real one, its plans run in the CPU interpreter.

Streams are lazy: what is given to one runs when somebody waits for it, so that host memory that is reused too early, a
copy in the wrong order or a missing wait gives wrong results here as it would on a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faser_trtllm.builder.network.options import NetworkOptions
from faser_trtllm.builder.network.segment import SegmentNetwork
from faser_trtllm.builder.plan_file import EARLY_EXIT, SEGMENT, Plan, PlanFile, PlanFileWriter, PlanInfo, Requirements
from faser_trtllm.engine.interpreter import Interpreter

VERSION = "1.7.1.116"
CAPABILITY = "8.9"


class StandInDevice:
    """engine/tensorrt_device.Device over host memory. log: what happened, in order."""

    def __init__(self, compute_capability: str = CAPABILITY) -> None:
        self.compute_capability = compute_capability
        self.log: list[str] = []
        self.memory: dict[int, np.ndarray] = {}
        self.host: dict[int, np.ndarray] = {}
        self.queues: dict[int, list[Callable[[], None]]] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.num_replays = 0
        self._captured: dict[int, list[Callable[[], None]]] = {}

    def make_current(self) -> None:
        pass

    def create_stream(self) -> int:
        self.queues[stream := 100 + len(self.queues)] = []
        return stream

    def destroy_stream(self, stream: int) -> None:
        assert not self.queues.pop(stream), "a stream is destroyed while work is on it"

    def synchronize(self, stream: int) -> None:
        assert stream not in self._captured, "waiting is not allowed while capturing"
        queue, self.queues[stream] = self.queues[stream], []
        for operation in queue:
            operation()

    def allocate(self, num_bytes: int) -> int:
        memory = np.zeros(num_bytes + 256, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self.memory[address] = memory
        return address

    def free(self, address: int) -> None:
        del self.memory[address]
        self.log.append("free")

    def host_array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = np.zeros(shape, dtype)
        self.host[array.ctypes.data] = array
        return array

    def free_host(self, array: np.ndarray) -> None:
        del self.host[array.ctypes.data]

    def upload(self, address: int, array: np.ndarray, stream: int) -> None:
        self._check(address, array.nbytes)
        self.enqueue(stream, lambda: ctypes.memmove(address, array.ctypes.data, array.nbytes))

    def download(self, array: np.ndarray, address: int, stream: int) -> None:
        self._check(address, array.nbytes)
        self.enqueue(stream, lambda: ctypes.memmove(array.ctypes.data, address, array.nbytes))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._check(target, num_bytes)
        self._check(source, num_bytes)
        assert abs(target - source) >= num_bytes, "the copy overlaps"
        self.enqueue(stream, lambda: ctypes.memmove(target, source, num_bytes))

    def zero(self, address: int, num_bytes: int, stream: int) -> None:
        self._check(address, num_bytes)
        self.enqueue(stream, lambda: ctypes.memset(address, 0, num_bytes))

    def begin_capture(self, stream: int) -> None:
        self._captured[stream] = []

    def end_capture(self, stream: int) -> int:
        self.graphs[graph := 1000 + len(self.graphs)] = self._captured.pop(stream)
        return graph

    def launch_graph(self, graph: int, stream: int) -> None:
        self.num_replays += 1
        for operation in self.graphs[graph]:
            self.enqueue(stream, operation)

    def destroy_graph(self, graph: int) -> None:
        del self.graphs[graph]
        self.log.append("graph")

    def is_capturing(self, stream: int) -> bool:
        return stream in self._captured

    def enqueue(self, stream: int, operation: Callable[[], Any]) -> None:
        self._captured.get(stream, self.queues[stream]).append(operation)

    def close(self) -> None:
        self.log.append("device")

    def _check(self, address: int, num_bytes: int) -> None:
        for start, memory in self.memory.items():
            if start <= address < start + memory.nbytes - 256:
                assert address + num_bytes <= start + memory.nbytes - 256, "beyond the end of a buffer"
                return
        raise AssertionError("no device memory is there")


class StandInTrt:
    """The module tensorrt_rtx with another Runtime; everything else is the real module's."""

    def __init__(
        self, trt: Any, device: StandInDevice, interpreters: Mapping[str, tuple[PlanInfo, Interpreter]]
    ) -> None:
        self._trt = trt
        self.__name__ = "tensorrt_rtx"
        self.__version__ = VERSION
        self.device = device
        self.interpreters = interpreters
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
        weakref.finalize(self, trt.device.log.append, "runtime")

    def get_engine_validity(self, view: memoryview) -> tuple[Any, int]:
        return self._trt.validity

    def deserialize_cuda_engine(self, view: memoryview) -> Any:
        with suppress(KeyError):
            return _Engine(self._trt, *self._trt.interpreters[hashlib.sha256(view).hexdigest()])
        return None


class _Engine:
    def __init__(self, trt: StandInTrt, info: PlanInfo, interpreter: Interpreter) -> None:
        self._trt = trt
        self.info = info
        self.interpreter = interpreter
        names = [spec.name for spec in (*info.inputs, *info.outputs)]
        self._names = [*names, trt.extra_tensor] if trt.extra_tensor else names
        weakref.finalize(self, trt.device.log.append, "engine")

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
        self._profile = -1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._last_run: Any = None
        weakref.finalize(self, trt.device.log.append, "context")
        trt.contexts.append(weakref.ref(self))

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        needed = self._engine.get_device_memory_size_for_profile_v2(self._profile)
        assert address % 256 == 0
        assert size >= needed
        self.scratch = (address, size)

    def is_stream_capturable(self, stream: int) -> bool:
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        smallest, _, largest = self._engine.info.profiles[self._profile][name]
        self._shapes[name] = shape
        return all(low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert any(start <= address < start + memory.nbytes for start, memory in self._trt.device.memory.items())
        self._addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        dynamic = {spec.name for spec in self._engine.info.inputs if spec.is_dynamic}
        every = {spec.name for spec in (*self._engine.info.inputs, *self._engine.info.outputs)}
        return sorted((dynamic - self._shapes.keys()) | (every - self._addresses.keys()))

    def execute_async_v3(self, stream: int) -> bool:
        assert self.scratch is not None
        info, shapes, addresses = self._engine.info, dict(self._shapes), dict(self._addresses)
        interpreter = self._engine.interpreter
        if self._trt.device.is_capturing(stream):
            assert self._last_run == (shapes, addresses), "TensorRT's first run on a shape must not be captured"
        self._last_run = (shapes, addresses)
        for spec in info.outputs:
            if "_cache_out_" in spec.name:
                assert addresses[spec.name] == addresses[spec.name.replace("_out", "")], "caches are updated in place"

        def run() -> None:
            feeds = {
                spec.name: _tensor(addresses[spec.name], shapes.get(spec.name, spec.shape), spec.dtype)
                for spec in info.inputs
            }
            for name, value in interpreter.run(feeds).items():
                if "_cache_out_" not in name:
                    dtype = next(spec.dtype for spec in info.outputs if spec.name == name)
                    _tensor(addresses[name], tuple(value.shape), dtype).copy_(value)

        self._trt.device.enqueue(stream, run)
        return True


def _tensor(address: int, shape: Sequence[Any], dtype: str) -> torch.Tensor:
    """Memory as a tensor, not copied."""
    kind = getattr(torch, dtype)
    size = int(np.prod(shape)) * kind.itemsize
    buffer = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(buffer, dtype=kind).reshape(tuple(shape))


@dataclass(frozen=True)
class StandIn:
    """A plan file, and the module and the device to open it with."""

    path: Path
    trt: StandInTrt
    device: StandInDevice


def make_stand_in(
    path: Path,
    trt: Any,
    networks: Sequence[tuple[SegmentNetwork, Sequence[Any]]],
    options: NetworkOptions,
    segments: Sequence[int],
    requirements: Requirements | None = None,
) -> StandIn:
    """Write a plan file whose plans are names, for networks (with plugin nodes) of segments and the early exit."""
    device = StandInDevice()
    interpreters: dict[str, tuple[PlanInfo, Interpreter]] = {}
    requirements = requirements or Requirements("tensorrt_rtx", VERSION, (CAPABILITY,), portable=False)
    with PlanFileWriter(path, requirements, options) as writer:
        for number, (network, plugin_nodes) in enumerate(networks):
            is_exit = number == len(segments) - 1
            first, last = (0, segments[-1]) if is_exit else segments[number : number + 2]
            profiles = [_profile(network, limit) for limit in (*options.profile_rows, options.max_num_tokens)]
            info = PlanInfo(
                kind=EARLY_EXIT if is_exit else SEGMENT,
                first=first,
                last=last,
                flavour=network.flavour,
                specification=network.specification,
                inputs=network.inputs,
                outputs=network.outputs,
                plugins=network.plugins,
                profiles=tuple(profiles),
            )
            plan = f"plan of {network.name} {number}".encode()
            writer.add(info, memoryview(plan))
            interpreter = Interpreter(trt, network.network, network.weights, plugin_nodes)
            interpreters[hashlib.sha256(plan).hexdigest()] = (info, interpreter)
    return StandIn(path, StandInTrt(trt, device, interpreters), device)


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
