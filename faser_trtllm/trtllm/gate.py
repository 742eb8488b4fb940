"""The only import of TensorRT-LLM, after a check of its version.

The scheduler's classes are those of 1.2; the drafter's base class is in later releases, too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass, fields
from typing import Any

from faser_trtllm.errors import ConfigError

ACCEPTED = ">=1.2,<1.3"
FIX = f"install tensorrt-llm{ACCEPTED} (the extra trtllm)"
DRAFTER_RELEASES = ("1.2", "1.3", "1.4")
"""Releases whose drafter classes are recorded (lab/trtllm_check/recorded), 1.3 and 1.4 from release candidates."""

_DRAFTER_FIX = "install 1.2.x, 1.3.0rc or 1.4.0rc, or serve without it (faser serve)"
_CONTRACT_FIX = "faser check --trtllm lists what differs; install another version, or serve without it (faser serve)"
_REMOVED = (
    "1.3 removed the engine backend and changed the classes that scheduler: trtllm calls; use the native scheduler, or "
)

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
    """TensorRT-LLM's classes that the scheduler and the KV cache manager use."""

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


def require_scheduler() -> str:
    """Return the installed version; raise ConfigError unless its scheduler is recorded."""
    version = installed_version("its scheduler")
    if not is_accepted(version):
        why = _REMOVED if release_of(version) in DRAFTER_RELEASES[1:] else ""
        raise ConfigError(f"TensorRT-LLM {version} is installed, accepted is {ACCEPTED}; {why}{FIX}")
    return version


def require_drafter() -> str:
    """Return the release ("1.3") of the installed version; raise ConfigError unless its drafter is recorded."""
    version = installed_version("FaserDrafter")
    if not is_drafter_known(version):
        raise ConfigError(f"TensorRT-LLM {version} is installed, and {_why_unknown(version)}; {_DRAFTER_FIX}")
    return release_of(version)


def _why_unknown(version: str) -> str:
    release = release_of(version)
    if release == "1.2":
        return "FaserDrafter is not written for candidates of 1.2.0"
    if release in DRAFTER_RELEASES:
        return f"FaserDrafter is not written for it: of {release}, only candidates of {release}.0 could be read"
    if re.match(r"(0|1\.[01])\.", version):
        return "FaserDrafter is not written for releases before 1.2"
    return f"FaserDrafter is not written for it: its classes are recorded up to {DRAFTER_RELEASES[-1]}.0rc"


def drafter_contract_error(what: str) -> ConfigError:
    """Return a ConfigError. what: a clause with the difference and its consequence ("has no x, so ...")."""
    return ConfigError(f"TensorRT-LLM {installed_version('FaserDrafter')} {what}; {_CONTRACT_FIX}")


def installed_version(what: str) -> str:
    """Return the installed version; raise ConfigError, which says that `what` needs it, if it is missing."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise ConfigError(f"the package tensorrt_llm is missing, and {what} needs it; {FIX}")
    try:
        return importlib.metadata.version("tensorrt-llm")
    except importlib.metadata.PackageNotFoundError:  # built from source, or a stand-in
        return str(import_module("tensorrt_llm").__version__)


def load_bindings() -> Bindings:
    """Return TensorRT-LLM's classes; raise ConfigError if it is missing, has a wrong version, or cannot be imported."""
    require_scheduler()
    found: dict[str, Any] = {}
    for module, names in _HOMES.items():
        home = import_module(module)
        for name in names:
            if not hasattr(home, name):
                raise ConfigError(f"TensorRT-LLM has no {module}.{name}, so its scheduler cannot be used; {FIX}")
            found[name] = getattr(home, name)
    return Bindings(**{field.name: found[field.name] for field in fields(Bindings)})


def is_accepted(version: str) -> bool:
    """Return True if a version's scheduler is recorded: 1.2 from its first release on, below 1.3."""
    return release_of(version) == "1.2" and not _is_candidate_of_first(version)


def is_drafter_known(version: str) -> bool:
    """Return True if a version's drafter is recorded: 1.2 from its first release on, and candidates of 1.3.0, 1.4.0."""
    release = release_of(version)
    return release in DRAFTER_RELEASES and _is_candidate_of_first(version) == (release != "1.2")


def release_of(version: str) -> str:
    """Return "1.3" for "1.3.0rc22"; "" if it is not a version."""
    match = re.match(r"(\d+\.\d+)(?=[.abrd+-]|$)", version)
    return match[1] if match else ""


def _is_candidate_of_first(version: str) -> bool:
    """Return True for a candidate of the first release of its line: 1.3.0rc22, but neither 1.3.0 nor 1.3.1rc1."""
    match = re.match(r"\d+\.\d+(?:\.(\d+))?[.-]?(a|b|rc|dev)?", version)
    return match is not None and int(match[1] or 0) == 0 and match[2] is not None


def import_module(module: str) -> Any:
    """Import a module of TensorRT-LLM; raise ConfigError if that fails."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"TensorRT-LLM is installed but {module} cannot be imported here ({reason}); "
            "run on a machine with its CUDA libraries, or in NVIDIA's container"
        ) from error
