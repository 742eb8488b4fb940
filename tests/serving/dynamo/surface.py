"""The parts of ai-dynamo 1.6.0 that the adapter uses, as recorded from it: names, fields, defaults, abstract methods.

install() stands in for the packages where they are not installed.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

IS_INSTALLED = importlib.util.find_spec("dynamo") is not None
ABSTRACT_METHODS = {"from_args", "start", "generate", "cleanup"}
OPTIONAL_METHODS = {
    "abort",
    "kv_event_sources",
    "health_check_payload",
    "component_metrics_dp_ranks",
    "attach_snapshot_publisher",
}
EXCEPTIONS = ("InvalidArgument", "Unknown", "WorkerUnavailable")


class LLMEngine(ABC):
    @classmethod
    @abstractmethod
    async def from_args(cls, argv=None): ...

    @abstractmethod
    async def start(self, worker_id): ...

    @abstractmethod
    async def generate(self, request, context): ...

    @abstractmethod
    async def cleanup(self): ...


@dataclass
class LlmRegistration:
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass
class EngineConfig:
    model: str
    served_model_name: str | None = None
    runtime_data: dict[str, Any] | None = None
    llm: LlmRegistration | None = None
    model_aliases: list[str] = field(default_factory=list)


@dataclass
class WorkerConfig:
    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""
    served_model_name: str | None = None
    endpoint_types: str = "chat,completions"
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None
    enable_kv_routing: bool = True


@dataclass(frozen=True)
class PushSource:
    on_ready: Callable[[Any], None]
    dp_rank: int = 0


@dataclass
class ComponentSnapshot:
    kv_used_blocks: int
    kv_total_blocks: int
    gpu_cache_usage: float
    dp_rank: int
    kv_cache_hit_rate: float | None = None


def build_health_check_payload(bos_token_id):
    return {
        "token_ids": [bos_token_id],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "_HEALTH_CHECK": True,
    }


_MODULES: dict[str, dict[str, Any]] = {
    "dynamo": {},
    "dynamo.common": {},
    "dynamo.common.backend": {
        "LLMEngine": LLMEngine,
        "EngineConfig": EngineConfig,
        "LlmRegistration": LlmRegistration,
        "WorkerConfig": WorkerConfig,
    },
    "dynamo.common.backend.health_check": {"build_health_check_payload": build_health_check_payload},
    "dynamo.common.backend.publisher": {
        "ComponentSnapshot": ComponentSnapshot,
        "KvEventSource": PushSource,
        "PushSource": PushSource,
    },
    "dynamo.llm": {},
    "dynamo.llm.exceptions": {name: type(name, (Exception,), {}) for name in EXCEPTIONS},
}


def install() -> list[str]:
    """Put the stand-ins where imports find them, and give their names."""
    for name, contents in _MODULES.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        module.__path__ = []  # a package
        sys.modules[name] = module
    return list(_MODULES)
