"""A GPU's memory, streams and graphs, as the TensorRT engine needs them (cuda-python's driver bindings).

Not run on a GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from faser_trtllm.builder.plan_file import arch_capability
from faser_trtllm.errors import FaserError
from faser_trtllm.ops.cuda.module import device_arch

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class GpuPartition:
    """A share of the GPU: what runs on its stream (of the whole device, or of a green context) stays within it."""

    name: str
    stream: int


class Device:
    """The primary context of one GPU. Addresses, streams and graphs are plain numbers; all copies are asynchronous.

    Every thread that uses it calls make_current() first. Raises ConfigError where cuda-python or a driver is missing,
    and FaserError with the driver's name of an error.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self.compute_capability = arch_capability(device_arch(ordinal))
        from cuda.bindings import driver

        self._driver: Any = driver
        self._device = self._call(driver.cuDeviceGet, ordinal)
        self._context: Any = self._call(driver.cuDevicePrimaryCtxRetain, self._device)
        self.make_current()

    def make_current(self) -> None:
        self._call(self._driver.cuCtxSetCurrent, self._context)

    def create_stream(self) -> int:
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._call(self._driver.cuStreamCreate, flags))

    def destroy_stream(self, stream: int) -> None:
        self._call(self._driver.cuStreamDestroy, stream)

    def synchronize(self, stream: int) -> None:
        self._call(self._driver.cuStreamSynchronize, stream)

    def allocate(self, num_bytes: int) -> int:
        """Device memory, zeroed (what a masked row reads must be finite) and aligned to 256 bytes."""
        num_bytes = max(num_bytes, 1)
        address = int(self._call(self._driver.cuMemAlloc, num_bytes, what=f"{num_bytes >> 20} MiB"))
        self._call(self._driver.cuMemsetD8, address, 0, num_bytes)
        self._call(self._driver.cuCtxSynchronize)  # streams of our own do not wait for the default one
        return address

    def free(self, address: int) -> None:
        self._call(self._driver.cuMemFree, address)

    def host_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Page-locked host memory for upload() and download(); lives until close()."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = int(self._call(self._driver.cuMemHostAlloc, max(size, 1), 0))
        buffer = (ctypes.c_uint8 * max(size, 1)).from_address(address)
        array: Array = np.frombuffer(memoryview(buffer), np.uint8)[:size].view(dtype).reshape(shape)
        return array

    def free_host(self, array: Array) -> None:
        self._call(self._driver.cuMemFreeHost, _address(array))

    def upload(self, address: int, array: Array, stream: int) -> None:
        """Contiguous host memory to the device; the array must stay as it is until the stream has got there."""
        self._call(self._driver.cuMemcpyHtoDAsync, address, _address(array), array.nbytes, stream)

    def download(self, array: Array, address: int, stream: int) -> None:
        self._call(self._driver.cuMemcpyDtoHAsync, _address(array), address, array.nbytes, stream)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Device to device; the two must not overlap."""
        self._call(self._driver.cuMemcpyDtoDAsync, target, source, num_bytes, stream)

    def zero(self, address: int, num_bytes: int, stream: int) -> None:
        self._call(self._driver.cuMemsetD8Async, address, 0, num_bytes, stream)

    def begin_capture(self, stream: int) -> None:
        """What the stream is given from now on is recorded, not run. Other threads may go on allocating."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call(self._driver.cuStreamBeginCapture, stream, mode)

    def end_capture(self, stream: int) -> int:
        """An executable graph of what was recorded."""
        graph = self._call(self._driver.cuStreamEndCapture, stream)
        try:
            return int(self._call(self._driver.cuGraphInstantiate, graph, 0))
        finally:
            self._call(self._driver.cuGraphDestroy, graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        self._call(self._driver.cuGraphLaunch, graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call(self._driver.cuGraphExecDestroy, graph)

    def close(self) -> None:
        """Give the context back; all that was made with it must be gone."""
        if self._context is not None:
            self._context = None
            self._call(self._driver.cuDevicePrimaryCtxRelease, self._device)

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, function: Any, *arguments: Any, what: str = "") -> Any:
        status, *values = function(*arguments)
        if int(status) != 0:
            raise FaserError(f"{function.__name__} failed with {status.name}{' for ' + what if what else ''}")
        return values[0] if values else None


def _address(array: Array) -> int:
    if not array.flags.c_contiguous:
        raise ValueError("copies to and from the device take contiguous arrays")
    address: int = array.__array_interface__["data"][0]
    return address
