"""A cubin in the driver: functions by name, launched with pointers and a stream (cuda-python's driver bindings)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from faser_trtllm.errors import ConfigError, FaserError

# c_void_p or c_int32; a type checker has no name for what lists of both have in common.
Argument = Any
Dim3 = tuple[int, int, int]


class Launcher(Protocol):
    """What an op's launch needs: a loaded cubin, or anything that runs the same kernels."""

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument], stream: int = 0) -> None:
        """Run a kernel: input pointers, int32 scalars, output pointers; asynchronous on a stream (0: default)."""


class Module:
    """A cubin loaded into the current CUDA context, or into device 0's primary context if none is current.

    A `with` block, or close(), unloads it. Raises ConfigError where cuda-python or a driver is missing, FaserError with
    the driver's name of the error otherwise.
    """

    def __init__(self, path: Path) -> None:
        self._driver = load_driver()
        ensure_context(self._driver)
        self._module = call_driver(self._driver, self._driver.cuModuleLoadData, path.read_bytes())
        self._functions: dict[str, Any] = {}

    def __enter__(self) -> Module:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unload the code; launches that are under way must have ended."""
        if self._module is not None:
            module, self._module = self._module, None
            self._functions.clear()
            call_driver(self._driver, self._driver.cuModuleUnload, module)

    def function(self, kernel: str) -> Any:
        """The CUfunction of a kernel, looked up once."""
        if self._module is None:
            raise FaserError(f"kernel {kernel} cannot be launched: its module is closed")
        if kernel not in self._functions:
            self._functions[kernel] = call_driver(
                self._driver, self._driver.cuModuleGetFunction, self._module, kernel.encode(), what=kernel
            )
        return self._functions[kernel]

    def launch(self, kernel: str, grid: Dim3, block: Dim3, arguments: Sequence[Argument], stream: int = 0) -> None:
        """As Launcher.launch. A grid of zero blocks is no launch."""
        if 0 in grid:
            return
        function = self.function(kernel)
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        call_driver(
            self._driver,
            self._driver.cuLaunchKernel,
            function,
            *grid,
            *block,
            0,
            self._driver.CUstream(stream),
            ctypes.addressof(pointers),
            0,
            what=kernel,
        )


def device_arch(ordinal: int = 0) -> str:
    """A device's architecture, like "sm_90"; ConfigError without a driver."""
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


def num_sms(ordinal: int = 0) -> int:
    """How many streaming multiprocessors a device has; ConfigError without a driver."""
    driver = load_driver()
    device = call_driver(driver, driver.cuDeviceGet, ordinal)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    return int(call_driver(driver, driver.cuDeviceGetAttribute, attribute, device))


def load_driver() -> Any:
    """cuda-python's driver bindings, initialised; ConfigError where they or a driver are missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError("cuda-bindings is not installed; pip install 'faser-trtllm[cuda]'") from error
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
    """What a driver function returns beside its status: nothing, a value, or a tuple of several.

    FaserError with the name of the driver's error, and `what` it was for.
    """
    status, *values = function(*arguments)
    if int(status) != 0:
        name = getattr(function, "__name__", "the CUDA driver")
        raise FaserError(f"{name} failed with {status.name}{' for ' + what if what else ''}")
    return tuple(values) if len(values) > 1 else values[0] if values else None
