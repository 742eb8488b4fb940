"""The one door to TensorRT-LLM: its version is checked before anything of it is imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass, fields
from typing import Any

from faser_trtllm.errors import ConfigError

ACCEPTED = ">=1.2,<1.3"
FIX = f"install tensorrt-llm{ACCEPTED} (faser-trtllm[trtllm])"

_HOMES = {
    "tensorrt_llm.bindings": ("LlmRequestState", "SamplingConfig", "DataType"),
    "tensorrt_llm.bindings.executor": ("CapacitySchedulerPolicy", "ContextChunkingPolicy"),
    "tensorrt_llm.bindings.internal.algorithms": ("CapacityScheduler", "MicroBatchScheduler"),
    "tensorrt_llm.bindings.internal.batch_manager": (
        "ContextChunkingConfig",
        "KVCacheManager",
        "LlmRequest",
        "ReqIdsSet",
    ),
}


@dataclass(frozen=True, slots=True)
class Bindings:
    """TensorRT-LLM's scheduling classes; nothing else of it is touched by the scheduler and the KV cache manager."""

    LlmRequestState: Any
    SamplingConfig: Any
    DataType: Any
    CapacitySchedulerPolicy: Any
    ContextChunkingPolicy: Any
    CapacityScheduler: Any
    MicroBatchScheduler: Any
    ContextChunkingConfig: Any
    KVCacheManager: Any
    LlmRequest: Any
    ReqIdsSet: Any


def require_tensorrt_llm() -> str:
    """The installed version, if it is an accepted one; ConfigError if there is none, or another."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise ConfigError(f"the package tensorrt_llm is missing, and TensorRT-LLM's scheduler needs it; {FIX}")
    try:
        version = importlib.metadata.version("tensorrt-llm")
    except importlib.metadata.PackageNotFoundError:  # built from source, or a stand-in
        version = str(import_module("tensorrt_llm").__version__)
    if not is_accepted(version):
        raise ConfigError(f"TensorRT-LLM {version} is installed, accepted is {ACCEPTED}; {FIX}")
    return version


def load_bindings() -> Bindings:
    """TensorRT-LLM's classes; ConfigError if it is missing, of another version, or cannot be imported here."""
    require_tensorrt_llm()
    found: dict[str, Any] = {}
    for module, names in _HOMES.items():
        home = import_module(module)
        for name in names:
            if not hasattr(home, name):
                raise ConfigError(f"TensorRT-LLM has no {module}.{name}, so its scheduler cannot be used; {FIX}")
            found[name] = getattr(home, name)
    return Bindings(**{field.name: found[field.name] for field in fields(Bindings)})


def is_accepted(version: str) -> bool:
    """Whether a version is at least 1.2 and below 1.3, candidates of 1.2.0 and 1.3.0 excluded."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?[.-]?(a|b|rc|dev)?", version)
    if match is None or (int(match[1]), int(match[2])) != (1, 2):
        return False
    return int(match[3] or 0) > 0 or match[4] is None


def import_module(module: str) -> Any:
    """A module of TensorRT-LLM; ConfigError if it cannot be imported here."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"TensorRT-LLM is installed but {module} cannot be imported here ({reason}); "
            "run on a machine with its CUDA libraries, or in NVIDIA's container"
        ) from error
