"""The interface of every backend's opener, and the entry point to all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import numpy.typing as npt

from faser_trtllm.backends import Backend, find_backend, names_with
from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.config import GpuPartitioning, KvCacheDtype, Quantization
from faser_trtllm.core.decision import Mode
from faser_trtllm.engine.base import Engine
from faser_trtllm.errors import ConfigError, EngineFileError, InvalidArgumentError
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.partition.green_context import GpuPartition
from faser_trtllm.sampling.draft_probs import HostDraftProbs
from faser_trtllm.sampling.rejection import CpuRejectionSampler, RejectionSampler


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """The arguments of an opener."""

    engines: EngineDir
    limits: BuildConfig  # what the executor needs, at most the built limits; max_draft_len is 0 unless drafting
    num_blocks: int  # KV blocks of each engine, if its cache is paged
    drafting: bool  # open the draft too
    core_set: CoreSet | None = None  # for backends that run on cores
    quantization: Quantization = Quantization.NONE  # of both models
    ordinal: int = 0  # the GPU of a draft alone (open_draft); our own targets run on the first
    # On a GPU, use fewer blocks if num_blocks does not fit this share of the memory left by weights and buffers; None:
    # fail if num_blocks does not fit.
    kv_memory_fraction: float | None = None
    kv_dtype: KvCacheDtype = KvCacheDtype.AUTO  # of the KV caches of both models
    num_branches: int = 0  # per request and pass; needs engines with a copy_kv
    gpu_partitions: GpuPartitioning = GpuPartitioning.GREEN_CONTEXTS
    deterministic: bool = False  # bits of the target's rows do not depend on the other rows of their pass
    overlap: bool = True  # draft and target may run at once, for which a GPU keeps more graphs

    @property
    def paths(self) -> dict[str, Path]:
        """The engine files to open, by role."""
        paths = {"target": self.engines.target_path}
        return paths | {"draft": self.engines.draft_path} if self.drafting else paths

    @property
    def plain_streams(self) -> bool:
        """True if partitions are plain streams instead of green contexts."""
        return self.gpu_partitions is GpuPartitioning.STREAMS

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token (EngineDir.kv_bytes_per_token) with the requested KV cache type."""
        return self.engines.kv_bytes_per_token(1 if self.kv_dtype is KvCacheDtype.FP8 else None)


@dataclass(frozen=True, slots=True)
class OpenedEngines:
    """The engines of a directory, with the functions that an executor needs to run them."""

    target: Engine
    draft: Engine | None
    enter_mode: Callable[[Mode], None]  # call between two steps when the mode changes
    sampler: RejectionSampler  # for the target's logits, on its device
    # The partitions of a GPU by their names in a cost table: "all" and, with a draft model, "draft" and "verify".
    partitions: Mapping[str, GpuPartition] = field(default_factory=dict)
    copy_kv: Callable[[npt.NDArray[np.int32]], None] | None = None  # CpuEngine.copy_kv, of targets that run branches
    # Opens the draft of another directory for the same target and returns a function that puts it in place of `draft`.
    # Call that function between two steps. None: the backend cannot replace drafts.
    prepare_draft: Callable[[Path], Callable[[], None]] | None = None


def cpu_sampler(request: OpenRequest) -> CpuRejectionSampler:
    """Return the sampler for a target whose logits are in host memory; it uses the threads of request.core_set."""
    limits, vocab_size = request.limits, request.engines.vocab_size
    draft_probs = HostDraftProbs(limits.max_batch_size, limits.max_draft_len if request.drafting else 0, vocab_size)
    pool = None if request.core_set is None else request.core_set.handle
    return CpuRejectionSampler(vocab_size, limits.max_draft_len, draft_probs, pool=pool)


def stay(mode: Mode) -> None:
    """Do nothing. This is enter_mode for a target alone, and for engines that run concurrently where they are."""


Opener = Callable[[OpenRequest, ExitStack], OpenedEngines]


def open_engines(request: OpenRequest, stack: ExitStack) -> OpenedEngines:
    """Open the target and, if drafting, the draft of a directory; the stack closes them.

    Raises ConfigError if the backend does not support the request, or a GPU, libraries or checkpoints are missing, and
    EngineFileError for engines that do not fit.
    """
    opened: OpenedEngines = resolve_name(check_request(request).opener)(request, stack)
    return opened


def check_request(request: OpenRequest) -> Backend:
    """Return the directory's backend; raise ConfigError if it does not support the request."""
    path, backend = request.engines.path, backend_of(request.engines)
    if request.quantization is not Quantization.NONE and not backend.has_fp8:
        fix = "--quantization FP8" if backend.builds_fp8 else f"--backend {names_with(lambda b: b.has_fp8)}"
        raise ConfigError(
            f"quantization is {request.quantization.value}, {path} holds {backend.name} engines, which run as "
            f"they were built; set it to none or build with {fix}"
        )
    if request.kv_dtype is not KvCacheDtype.AUTO and not backend.has_fp8_kv:
        raise ConfigError(
            f"kv_cache_config.dtype is {request.kv_dtype.value}, {path} holds {backend.name} engines, whose KV cache "
            f"has their own type; set it to auto or build with --backend {names_with(lambda b: b.has_fp8_kv)}"
        )
    if request.deterministic:
        _check_deterministic(request, backend)
    if request.num_branches and not backend.has_branches:
        raise ConfigError(
            f"num_branches is {request.num_branches}, {path} holds {backend.name} engines, whose passes have chains "
            f"only; set it to 0 or build with --backend {names_with(lambda b: b.has_branches)}"
        )
    if request.plain_streams and backend.on_cpu:
        raise ConfigError(
            f"gpu_partitions is {request.gpu_partitions.value}, {path} holds {backend.name} engines, which run on "
            f"cores; leave it out or build with --backend {names_with(lambda b: not b.on_cpu)}"
        )
    return backend


def _check_deterministic(request: OpenRequest, backend: Backend) -> None:
    path, tp_size = request.engines.path, request.engines.tp_size
    if not backend.is_deterministic:
        raise ConfigError(
            f"deterministic is true, {path} holds {backend.name} engines, whose products depend on the number of rows; "
            f"set it to false or build with --backend {names_with(lambda b: b.is_deterministic)}"
        )
    if request.quantization is not Quantization.NONE:
        raise ConfigError(
            f"deterministic is true and quantization is {request.quantization.value}, whose products are a library's; "
            "set deterministic to false or quantization to none"
        )
    if tp_size > 1:
        raise ConfigError(
            f"deterministic is true, and the target of {path} is split over {tp_size} GPUs, whose products are a "
            "library's; set it to false or build with --tp_size 1"
        )


def open_draft(request: OpenRequest, stack: ExitStack) -> Engine:
    """Open only the draft, for a target that another system runs; raises the same errors as open_engines."""
    opener = check_draft_backend(request.engines)
    engine: Engine = resolve_name(opener)(request, stack)
    return engine


def check_draft_backend(engines: EngineDir) -> str:
    """Return the draft_opener of a directory's backend. Raises ConfigError if there is none, or if the draft is a head,
    which can only draft for its own target."""
    backend = backend_of(engines)
    if backend.draft_opener is None:
        usable = names_with(lambda b: b.draft_opener)
        raise ConfigError(
            f"{engines.path} holds {backend.name} engines, and only {usable} drafts can draft for another system's "
            f"target; build with --backend {usable}"
        )
    if engines.draft_head is not None:
        raise ConfigError(
            f"{engines.path} has a draft head, which reads hidden rows of a target of ours; build with a draft model "
            "to draft for another system"
        )
    return backend.draft_opener


def backend_of(engines: EngineDir) -> Backend:
    """Return the backend named in a manifest; raise EngineFileError for an unknown one."""
    try:
        return find_backend(engines.backend)
    except InvalidArgumentError as error:
        raise EngineFileError(f"{engines.path} cannot be opened: {error}; rebuild it with faser build") from error
