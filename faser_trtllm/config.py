"""The service's configuration (faser.yaml), with TensorRT-LLM's names where they exist; unknown keys are refused."""

from __future__ import annotations

import difflib
import enum
import reprlib
import sys
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from faser_trtllm.acceptance_curves import by_place, published_curves, published_names
from faser_trtllm.errors import ConfigError, reason_of

DEFAULT_SPECULATION = "auto"
MAX_FILE_BYTES = 128 << 10  # takes about 0.8 s to parse
MAX_TIME_S = 365 * 86_400  # a year: JSON has no infinity, and clocks overflow at larger values
SPELLINGS = (
    "off, fixed:K, schedule, schedule:1=4,8=0 (4 drafts from batch size 1 on, none from 8 on), gp_lcb, price, or auto "
    "(price if costs were measured, as `faser build` does for the CPU, else fixed:4)"
)
DRAFTERS = (
    "source of drafts: model (the draft model), suffix (continuations found in the request's own text), or both as "
    "suffix,model; default: model, or suffix without a draft engine"
)

BRANCHES = (
    "token trees (SpecInfer): verify up to this many alternative tokens per request and step, each in a KV block. With "
    "fixed:K they replace the least likely drafts; with price they are added where they pay. Needs a draft model, and "
    "cpu or cuda engines"
)

DETERMINISTIC = (
    "on a GPU, compute each row of the target in one order, whatever runs with it: greedy and seeded text is then the "
    "same with and without speculation, but slower; cuda engines (cpu engines always do it)"
)


class KvCacheDtype(str, enum.Enum):
    AUTO = "auto"
    FP8 = "fp8"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CapacitySchedulerPolicy(str, enum.Enum):
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    MAX_UTILIZATION = "MAX_UTILIZATION"


class ContextChunkingPolicy(str, enum.Enum):
    FIRST_COME_FIRST_SERVED = "FIRST_COME_FIRST_SERVED"
    EQUAL_PROGRESS = "EQUAL_PROGRESS"


class SchedulerKind(str, enum.Enum):
    NATIVE = "native"
    TRTLLM = "trtllm"


class DrafterName(str, enum.Enum):
    MODEL = "model"
    SUFFIX = "suffix"


class Quantization(str, enum.Enum):
    NONE = "none"
    FP8 = "fp8"


class GpuPartitioning(str, enum.Enum):
    GREEN_CONTEXTS = "green_contexts"
    STREAMS = "streams"


class KvCacheConfig(_Strict):
    max_tokens: int | None = Field(
        None, ge=1, description="KV cache capacity in tokens; default: max_batch_size x max_seq_len, if memory allows"
    )
    free_gpu_memory_fraction: float = Field(
        0.9, gt=0.0, le=1.0, description="share of the GPU memory that weights and buffers leave; limited by max_tokens"
    )
    enable_block_reuse: bool = Field(True, description="share KV blocks of common prefixes; off with scheduler trtllm")
    dtype: KvCacheDtype = Field(
        KvCacheDtype.AUTO,
        description="auto: as the engine was built; fp8: e4m3 without scales, half the memory, cuda engines only",
    )


class SchedulerConfig(_Strict):
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    enable_chunked_context: bool = True
    chunk_unit_size: int = Field(
        16, ge=1, description="chunks that do not finish a prompt are a multiple of this many tokens"
    )
    context_chunking_policy: ContextChunkingPolicy = Field(
        ContextChunkingPolicy.FIRST_COME_FIRST_SERVED, description="EQUAL_PROGRESS needs scheduler trtllm"
    )


class ExecutorConfig(_Strict):
    """Settings of the executor. A limit of None is the one that the engine was built with."""

    max_batch_size: int | None = Field(None, ge=1)
    max_num_tokens: int | None = Field(None, ge=1)
    max_seq_len: int | None = Field(None, ge=2)
    max_draft_len: int | None = Field(None, ge=0)
    speculation: str = Field(DEFAULT_SPECULATION, description=SPELLINGS)
    drafters: tuple[DrafterName, ...] | None = Field(None, description=DRAFTERS)
    num_branches: int = Field(0, ge=0, le=16, description=BRANCHES)
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    scheduler: SchedulerKind = Field(
        SchedulerKind.NATIVE, description="native, or trtllm for TensorRT-LLM's own schedulers and KV cache manager"
    )
    scheduler_config: SchedulerConfig = SchedulerConfig()
    trace_file: str | None = Field(None, description="file for a Chrome/Perfetto trace of every step")
    num_threads: int | None = Field(None, ge=1, description="threads of the CPU engine; default: all cores it may use")
    cores: tuple[int, ...] | None = None
    quantization: Quantization = Field(
        Quantization.NONE,
        description="fp8: quantize layer matrices to e4m3 at load time; cuda engines on compute capability 8.9+",
    )
    deterministic: bool = Field(False, description=DETERMINISTIC)
    gpu_partitions: GpuPartitioning = Field(
        GpuPartitioning.GREEN_CONTEXTS,
        description="for overlapped modes on a GPU: green_contexts (SMs for each model) or streams (all SMs for both)",
    )
    synthetic_acceptance: float | tuple[float, ...] | None = Field(
        None,
        description="for benchmarks only, OUTPUTS ARE NOT THE TARGET'S: mean number of accepted drafts per step; or a "
        "list of acceptance probabilities by position, given that the drafts before it were accepted; or the name of "
        "a published curve, such as eagle3",
    )
    synthetic_acceptance_seed: int = Field(0, ge=0, lt=1 << 64)
    max_queue_size: int = Field(4096, ge=1, description="requests waiting or running; more are refused as UNAVAILABLE")

    @field_validator("drafters", mode="before")
    @classmethod
    def _check_drafters(cls, value: Any) -> Any:
        names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
        known = [name.value for name in DrafterName]
        if names is not None and (
            not isinstance(names, (list, tuple)) or not names or any(name not in known for name in names)
        ):
            raise ValueError(f"it must be a list of {' and '.join(known)}, or one of them")
        if names is not None and len(set(names)) < len(names):
            raise ValueError("it names a drafter twice")
        return names

    @field_validator("synthetic_acceptance", mode="before")
    @classmethod
    def _check_acceptance(cls, value: Any) -> Any:
        if isinstance(value, str) and value in published_curves():
            return by_place(published_curves()[value])
        numbers = value if isinstance(value, (list, tuple)) else [0.0 if value is None else value]
        limit = 1.0 if isinstance(value, (list, tuple)) else sys.float_info.max
        if not all(type(number) in (int, float) and 0 <= number <= limit for number in numbers):
            raise ValueError(
                "it must be a number of at least 0, or a list of numbers from 0 to 1, or a published curve: "
                + published_names()
            )
        return value


class ServiceConfig(ExecutorConfig):
    """The settings of faser.yaml, for the executor and the service."""

    engine_dir: str | None = None
    max_queue_bytes: int = Field(
        1 << 30,
        ge=1 << 20,
        description="limit on the memory of waiting and running requests, with their log probs and logits; more "
        "are refused as UNAVAILABLE",
    )
    max_priority: float = Field(
        0.5, ge=0, le=1, description="highest priority that a request may have; requests without one have 0.5"
    )
    default_timeout_ms: float = Field(
        600_000.0,
        ge=0,
        le=86_400_000,
        description="timeout_ms of requests that have none and do not stream, since their clients may be gone; 0: none",
    )
    cache_salt: Literal["request", "client"] = Field(
        "request",
        description="which requests share KV blocks: those with equal salts, or only those of one client "
        "(x-faser-client) with equal salts",
    )
    stop_by_id: bool = Field(
        False,
        description="let anyone who knows or guesses a request's id stop it, as TensorRT-LLM does; otherwise the id "
        "must be a random UUID, or the proxy must name the client (x-faser-client)",
    )
    startup_timeout_s: float = Field(120.0, gt=0, le=MAX_TIME_S, description="time limit for opening the engine")
    drain_timeout_s: float = Field(
        10.0, ge=0, le=MAX_TIME_S, description="time for running requests to finish after SIGTERM"
    )
    restart_backoff_s: float = Field(
        0.1, gt=0, le=MAX_TIME_S, description="first wait before a crashed engine child is restarted"
    )
    restart_backoff_max_s: float = Field(10.0, gt=0, le=MAX_TIME_S)
    health_timeout_s: float = Field(
        4.0,
        gt=0,
        le=MAX_TIME_S,
        description="report not ready after this long without an answer or in one step, or after 4 times the duration "
        "of slow steps if that is longer",
    )
    hang_timeout_s: float = Field(
        60.0, gt=0, le=MAX_TIME_S, description="restart an engine child or a server that hangs for this long"
    )
    cancellation_check_period_ms: int = Field(5, ge=1, le=1000 * MAX_TIME_S)
    draft_timeout_ms: float = Field(
        2000.0,
        gt=0,
        le=1000 * MAX_TIME_S,
        description="turn speculation off for a while after a draft call (without prefill) that took longer",
    )
    guide_compile_timeout_s: float = Field(
        2.0, gt=0, le=MAX_TIME_S, description="CPU time for compiling a guide; one that takes longer is refused"
    )
    stream_interval: Literal["auto"] | int = Field(
        "auto",
        description="steps between two streamed responses of a request, or auto: one, merged for up to 50 ms while "
        "sending takes much of the time; the first and the last response are sent at once",
    )
    otlp_traces_endpoint: str | None = Field(
        None, description="OTLP/HTTP collector for request spans; default: OTEL_EXPORTER_OTLP_ENDPOINT, else none"
    )

    @field_validator("stream_interval", mode="before")
    @classmethod
    def _check_stream_interval(cls, value: Any) -> Any:
        if value != "auto" and not (type(value) is int and value >= 1):
            raise ValueError("it must be auto or a number of steps, 1 or more")
        return value

    @property
    def steps_per_response(self) -> int:
        """Number of steps whose output of a request is collected into one response."""
        return 1 if self.stream_interval == "auto" else self.stream_interval


def load_service_config(path: Path | None, overrides: dict[str, Any] | None = None) -> ServiceConfig:
    """Read faser.yaml, if given, and apply overrides that are not None; raise ConfigError if a setting is invalid."""
    data = read_mapping(path) if path is not None else {}
    data = data | {key: value for key, value in (overrides or {}).items() if value is not None}
    return parse(ServiceConfig, data)


def read_mapping(path: Path) -> dict[Any, Any]:
    """Return the mapping in a YAML or JSON file; raise ConfigError if there is none."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"the configuration {path.name} has more than {MAX_FILE_BYTES} bytes; shorten it")
        data = yaml.load(content.decode(), _Loader) or {}
    except OSError as error:
        raise ConfigError(f"the configuration {path.name} cannot be read: {reason_of(error)}") from error
    except ConfigError:
        raise
    except Exception as error:  # the parser passes on any error of its code for tags
        raise ConfigError(f"the configuration {path.name} is not valid YAML: {_yaml_reason(error)}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration {path.name} must be a mapping of keys to values")
    return data


class _Loader(yaml.SafeLoader):
    """A loader that refuses a mapping with the same key twice; PyYAML's own takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise ValueError(f"it has {key.value!r:.80} on line {lines[key.value]} and again on line {line}")
                lines[key.value] = line
        return super().construct_mapping(node, deep)


def _yaml_reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem or error.context}, on line {error.problem_mark.line + 1}"
    return (str(error).splitlines() or [type(error).__name__])[0]


Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], data: dict[str, Any]) -> Model:
    """Return data as an instance of a pydantic model; raise ConfigError, which suggests a known key for a typo."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            close = difflib.get_close_matches(str(first["loc"][-1]), _field_names(model, first["loc"][:-1]), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"unknown configuration key {key}{hint}") from None
        found = first["input"]
        # With YAML aliases, a few lines can be a value whose text would not fit in memory.
        shown = reprlib.repr(found) if isinstance(found, (list, tuple, dict, set)) else repr(found)
        says = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"configuration key {key} is {shown:.200}: {says[:1].lower()}{says[1:]}") from None


def _field_names(model: type[Any], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None or not hasattr(field.annotation, "model_fields"):
            return []
        model = field.annotation
    return list(model.model_fields)
