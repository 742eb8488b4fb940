"""Import TensorRT or TensorRT for RTX, which share an API but differ in capabilities. No other module does."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from faser_trtllm.errors import ConfigError

log = logging.getLogger(__name__)

MODULES = {
    "tensorrt_rtx": "pip install 'tensorrt_rtx_cu13==1.7.1.116' (it builds without a GPU)",
    "tensorrt": "pip install 'tensorrt>=10.13' on a machine with an NVIDIA driver",
}
RTX_GPUS = "Supported compute capabilities: 8.0 8.6 8.9 12.0 12.1 >12.0"
"""Message of TensorRT for RTX 1.7.1 when it loads plans on an H100 (2026-11-26)."""
_RTX_GAP = (9, 0), (11, 99)  # Hopper and later, before 12.0
# TensorRT logs this with every failed call on a machine without a driver.
_NO_DRIVER = "CUDA driver version is insufficient"


def load_tensorrt(name: str) -> Any:
    """Import tensorrt_rtx or tensorrt; ConfigError names the package to install if that fails."""
    if name not in MODULES:
        raise ConfigError(f"TensorRT module is {name!r}; it must be one of {', '.join(MODULES)}")
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{name} cannot be imported ({reason}); install it with {MODULES[name]}") from error


def rtx_refusal(capability: str) -> str:
    """Return why TensorRT for RTX does not run on a GPU of this compute capability, such as "9.0"; "" if it may."""
    first, last = _RTX_GAP
    if not first <= tuple(map(int, capability.split("."))) <= last:
        return ""
    return f'TensorRT for RTX refuses such GPUs in its own words: "{RTX_GPUS}"'


@functools.lru_cache
def logger(trt: Any) -> Any:
    """Return the process's ILogger, which forwards warnings and errors to Python logging.

    .errors: error messages since the caller cleared it, oldest first; they explain why a builder returned None.
    """
    severities = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.WARNING,
        trt.ILogger.INFO: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            level = severities.get(severity)
            if level is None or _NO_DRIVER in message:
                return
            if level == logging.ERROR:
                self.errors.append(" ".join(message.split()))
            log.log(level, "%s: %s", trt.__name__, message)

    return Logger()


def create_network(trt: Any, builder: Any) -> Any:
    """Return an empty, strongly typed INetworkDefinition whose plugins use ahead-of-time kernels."""
    flags = 0
    for name in ("STRONGLY_TYPED", "PREFER_AOT_PYTHON_PLUGINS"):
        flag = getattr(trt.NetworkDefinitionCreationFlag, name, None)
        if flag is not None:
            flags |= 1 << int(flag)
    return builder.create_network(flags)
