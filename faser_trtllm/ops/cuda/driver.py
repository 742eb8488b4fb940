"""The CUDA driver through cuda-python's bindings: devices, loaded cubins and their launches, page-locked memory."""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from faser_trtllm.core.closing import Closing
from faser_trtllm.errors import ConfigError, FaserError, install

if TYPE_CHECKING:
    import torch

# c_void_p or c_int32; no common base type covers both.
Argument = Any
Dim3 = tuple[int, int, int]


class PackedArguments(tuple[Argument, ...]):
    """Arguments of one or more launches. address: of the array of pointers to them, for cuLaunchKernel."""

    pointers: ctypes.Array[ctypes.c_void_p]
    address: int

    def __new__(cls, arguments: Sequence[Argument]) -> PackedArguments:
        made = super().__new__(cls, arguments)
        made.pointers = (ctypes.c_void_p * len(made))(*[ctypes.addressof(argument) for argument in made])
        made.address = ctypes.addressof(made.pointers)
        return made


class Launcher(Protocol):
    """The interface that ops launch kernels through."""

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument]) -> None:
        """Launch a kernel asynchronously, with input pointers, int32 scalars and output pointers in this order."""


class StreamLauncher(Protocol):
    """A loaded cubin or another runner of the same kernels; by itself, a Launcher on the default stream."""

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument], stream: int = 0) -> None:
        """See Launcher.launch; `stream` is a CUstream as a number."""


class OnStream:
    """A Launcher on the stream that is current at each launch, which `stream` returns as a number."""

    def __init__(self, launcher: StreamLauncher, stream: Callable[[], int]) -> None:
        self.launcher = launcher
        self.stream = stream

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument]) -> None:
        self.launcher.launch(kernel, grid, block, arguments, self.stream())


class Module(Closing):
    """A cubin, loaded for every context: a CUkernel runs in the context of the stream that it is launched on, so green
    contexts need no copies.

    A `with` block, or close(), unloads it. Raises ConfigError if cuda-python or a driver is missing, otherwise
    FaserError with the driver's error name.
    """

    def __init__(self, path: Path) -> None:
        self._driver = load_driver()
        ensure_context(self._driver)
        load = self._driver.cuLibraryLoadData
        self._library = call_driver(self._driver, load, path.read_bytes(), None, None, 0, None, None, 0)
        self._functions: dict[str, Any] = {}

    def close(self) -> None:
        """Unload the code; its launches must have finished."""
        if self._library is not None:
            library, self._library = self._library, None
            self._functions.clear()
            call_driver(self._driver, self._driver.cuLibraryUnload, library)

    def function(self, kernel: str) -> Any:
        """Return a kernel as a CUfunction; it is looked up once."""
        if self._library is None:
            raise FaserError(f"kernel {kernel} cannot be launched: its module is closed")
        if kernel not in self._functions:
            found = call_driver(
                self._driver, self._driver.cuLibraryGetKernel, self._library, kernel.encode(), what=kernel
            )
            self._functions[kernel] = self._driver.CUfunction(int(found))
        return self._functions[kernel]

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument], stream: int = 0) -> None:
        """See StreamLauncher.launch. An empty grid launches nothing."""
        if 0 in grid:
            return
        function = self._functions.get(kernel) or self.function(kernel)
        packed = arguments if isinstance(arguments, PackedArguments) else PackedArguments(arguments)
        driver = self._driver
        (status,) = driver.cuLaunchKernel(function, *grid, *block, 0, driver.CUstream(stream), packed.address, 0)
        if status:  # checked here, since call_driver() would add a tenth to a launch
            raise _failure("cuLaunchKernel", status, kernel)


def device_arch(ordinal: int = 0) -> str:
    """Return a device's architecture, like "sm_90"; raise ConfigError without a driver."""
    driver = load_driver()
    device = call_driver(driver, driver.cuDeviceGet, ordinal)
    attributes = driver.CUdevice_attribute
    major, minor = (
        call_driver(driver, driver.cuDeviceGetAttribute, attribute, device)
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return f"sm_{major}{minor}"


def driver_version() -> int:
    """Return the CUDA version that the driver is for, 12080 for 12.8; raise ConfigError without a driver."""
    driver = load_driver()
    return int(call_driver(driver, driver.cuDriverGetVersion))


def device_name(ordinal: int = 0) -> str:
    """Return a device's name, like "NVIDIA H100 80GB HBM3"; raise ConfigError without a driver."""
    driver = load_driver()
    device = call_driver(driver, driver.cuDeviceGet, ordinal)
    name: bytes = call_driver(driver, driver.cuDeviceGetName, 256, device)
    return name.split(b"\0")[0].decode()


def num_sms(ordinal: int = 0) -> int:
    """Return a device's number of streaming multiprocessors; raise ConfigError without a driver."""
    driver = load_driver()
    device = call_driver(driver, driver.cuDeviceGet, ordinal)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return int(call_driver(driver, driver.cuDeviceGetAttribute, attribute, device))


def num_devices() -> int:
    """Return the number of GPUs that this process sees; raise ConfigError without a driver."""
    driver = load_driver()
    return int(call_driver(driver, driver.cuDeviceGetCount))


def free_bytes() -> int:
    """Return the free memory of the current context's device; raise ConfigError without a driver."""
    driver = load_driver()
    ensure_context(driver)
    return int(call_driver(driver, driver.cuMemGetInfo)[0])


def load_driver() -> Any:
    """Return cuda-python's driver bindings, initialized; raise ConfigError if they or a driver are missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(f"cuda-bindings is not installed; {install('cuda')}") from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:
        raise ConfigError(
            "libcuda.so.1 is missing; install an NVIDIA driver on a machine with an NVIDIA GPU"
        ) from error
    if int(status) != 0:
        raise ConfigError(f"the CUDA driver does not start ({status.name}); check that nvidia-smi shows a GPU")
    return driver


def ensure_context(driver: Any) -> None:
    """Make device 0's primary context current if this thread has none."""
    if int(call_driver(driver, driver.cuCtxGetCurrent)) == 0:
        device = call_driver(driver, driver.cuDeviceGet, 0)
        call_driver(driver, driver.cuCtxSetCurrent, call_driver(driver, driver.cuDevicePrimaryCtxRetain, device))


def call_driver(driver: Any, function: Any, *arguments: Any, what: str = "") -> Any:
    """Call the driver and return the results without the status: None, a value, or a tuple.

    Raises FaserError with the driver's error name. what: what the call was for.
    """
    status, *values = function(*arguments)
    if int(status) != 0:
        raise _failure(getattr(function, "__name__", "the CUDA driver"), status, what)
    return tuple(values) if len(values) > 1 else values[0] if values else None


def _failure(name: str, status: Any, what: str) -> FaserError:
    return FaserError(f"{name} failed with {status.name}{' for ' + what if what else ''}")


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a zeroed tensor in page-locked memory, which is freed with the last tensor or array that views it; copies
    from and to it must have ended by then. Raises FaserError if the driver refuses, as when no such memory is left.

    torch's own page-locked memory records an event on every stream that copied it when it is freed, and aborts the
    process if the driver refuses, as it does after the device has failed.
    """
    import torch

    driver = load_driver()
    ensure_context(driver)
    num_items = math.prod(shape)
    num_bytes = max(1, num_items) * dtype.itemsize
    address = int(call_driver(driver, driver.cuMemHostAlloc, num_bytes, 0))
    ctypes.memset(address, 0, num_bytes)
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(memory, _free, driver, address).atexit = False  # the system frees it when the process ends
    return torch.frombuffer(memory, dtype=dtype)[:num_items].view(shape)


def _free(driver: Any, address: int) -> None:
    with contextlib.suppress(FaserError):  # a failed device refuses, which has been reported elsewhere
        ensure_context(driver)
        call_driver(driver, driver.cuMemFreeHost, address)
