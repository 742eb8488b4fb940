"""FaserDrafter: a drafter for TensorRT-LLM's UserProvidedDecodingConfig. Contract-tested, not run against TensorRT-LLM.

TensorRT-LLM reserves room for max_draft_len drafts per request, calls the drafter, and pads proposals to that length
with zeros: padding is either rejected or equal to the target's own token. So a shorter proposal saves drafting but not
verification, and we need not manage pages.

Each TensorRT-LLM process calls its own copy of the drafter. Copies decide by their own clocks and may differ, so we
refuse to run unless one process verifies on one GPU.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.core.clock import MonotonicClock
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.engine.base import Engine
from faser_trtllm.engine.opening import OpenRequest, backend_of, check_draft_backend, open_draft
from faser_trtllm.errors import ConfigError
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.policy.registry import check_spelling, make_policy, needs_costs
from faser_trtllm.trtllm.drafter_core import Asked, DraftCore, num_pending_drafts

if TYPE_CHECKING:
    FaserDrafter: Any
    FaserResources: Any

log = logging.getLogger(__name__)

_DRAFTER_MODULE = "tensorrt_llm._torch.speculative.drafter"
_RESOURCE_MODULE = "tensorrt_llm._torch.pyexecutor.resource_manager"
_DUMMY_MARKS = ("is_attention_dp_dummy", "is_cuda_graph_dummy", "is_dummy_request")
_REQUEST_FIELDS = (
    "get_tokens",
    "py_draft_pages_allocated",
    "py_draft_tokens",
    "py_max_new_tokens",
    "py_orig_prompt_len",
    "py_request_id",
)
"""Fields of a TensorRT-LLM request that the drafter reads or sets and that must exist."""

_PARALLEL_SIZES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "cp_size": "context_parallel_size",
}
"""Sizes of TensorRT-LLM's Mapping, with their names in its LLM API."""

DraftOpener = Callable[[OpenRequest, ExitStack], Engine]


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """Options of FaserDrafter.

    engine_dir: a directory of `faser build` with a draft; its target is not used.
    speculation: a policy of faser.yaml; "" is price with a cost table, else fixed:max_draft_len.
    cost_table: a profile.json with the target's verify times.
    cores, num_threads: for a draft on the CPU; keep TensorRT-LLM's threads off them. A draft on the GPU gets a green
        context on the GPU that is torch's current one on first use.
    max_concurrency: TensorRT-LLM stops speculating while more requests are active.
    draft_len_schedule: TensorRT-LLM's draft lengths by number of active requests, each from its key on; 1.2 only.
    """

    engine_dir: Path
    max_draft_len: int = 4
    speculation: str = ""
    cost_table: Path | None = None
    max_batch_size: int | None = None
    max_seq_len: int | None = None
    cores: tuple[int, ...] | None = None
    num_threads: int | None = None
    draft_ahead: bool = True
    max_concurrency: int | None = None
    draft_len_schedule: Mapping[int, int] | None = None

    @property
    def policy(self) -> str:
        return self.speculation or ("price" if self.cost_table is not None else f"fixed:{self.max_draft_len}")


class OpenedDrafter:
    """The engine, the policy and the core of one drafter; close() frees them."""

    def __init__(self, options: DrafterOptions, open_engine: DraftOpener = open_draft) -> None:
        """Open the engine; raises ConfigError or EngineFileError."""
        with ExitStack() as stack:
            self.core = _open(options, open_engine, stack)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()


def check_drafter(options: DrafterOptions) -> None:
    """Raise ConfigError or EngineFileError for options that cannot work, without opening an engine."""
    engines = EngineDir.load(options.engine_dir)
    if not engines.has_draft:
        raise ConfigError(f"{options.engine_dir} has no draft engine; build one with --draft_checkpoint_dir")
    check_draft_backend(engines)
    if options.max_draft_len < 1:
        raise ConfigError(f"max_draft_len is {options.max_draft_len}; it must be at least 1")
    check_spelling(options.policy, options.max_draft_len)
    if needs_costs(options.policy) and options.cost_table is None:
        raise ConfigError(f"speculation is {options.policy}, which needs a cost_table; name one or use fixed:K")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise ConfigError(
            f"max_concurrency is {options.max_concurrency}; it must be at least 1; leave it out for no limit"
        )
    if options.draft_len_schedule is not None:
        _check_schedule(options.draft_len_schedule, options.max_draft_len)


def _check_schedule(schedule: Mapping[int, int], max_draft_len: int) -> None:
    """Raise ConfigError for a schedule that the configuration of 1.2 refuses."""
    if schedule.get(1) != max_draft_len or any(
        size < 1 or not 0 <= length <= max_draft_len for size, length in schedule.items()
    ):
        raise ConfigError(
            f"draft_len_schedule is {dict(schedule)}; it must give 1 active request the length max_draft_len "
            f"({max_draft_len}), and more of them lengths from 0 to that"
        )


def _open(options: DrafterOptions, open_engine: DraftOpener, stack: ExitStack) -> DraftCore:
    check_drafter(options)
    engines = EngineDir.load(options.engine_dir)
    built = engines.build_config
    limits = BuildConfig(
        max_batch_size=min(options.max_batch_size or built.max_batch_size, built.max_batch_size),
        max_num_tokens=built.max_num_tokens,
        max_seq_len=min(options.max_seq_len or built.max_seq_len, built.max_seq_len),
        max_draft_len=num_pending_drafts(options.max_draft_len, options.draft_ahead),
        tokens_per_block=built.tokens_per_block,
    )
    num_blocks = limits.max_batch_size * -(-limits.max_seq_len // limits.tokens_per_block)
    costs = _read_costs(options.cost_table) if options.cost_table is not None else None
    policy = make_policy(options.policy, options.max_draft_len, costs, limits.max_batch_size)
    on_cpu = backend_of(engines).on_cpu
    core_set = stack.enter_context(CoreSet(options.cores, options.num_threads)) if on_cpu else None
    ordinal = 0 if on_cpu else current_gpu()
    request = OpenRequest(engines, limits, num_blocks, drafting=True, core_set=core_set, ordinal=ordinal)
    engine = open_engine(request, stack)
    core = DraftCore(
        engine,
        policy,
        MonotonicClock(),
        max_draft_len=options.max_draft_len,
        draft_ahead=options.draft_ahead,
        draft_window=engines.draft_window,
    )
    stack.callback(core.close)
    return core


def current_gpu() -> int:
    """Return torch's current GPU, which TensorRT-LLM sets in the drafting thread; 0 if torch has none."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_available() else 0


def _read_costs(path: Path) -> CostTable:
    """Read a table of any machine, since the target's times are not those of this engine directory."""
    table = CostTable.read(path)
    table.check_measured(path.name)
    return table


def _make_drafter() -> type:
    """Return FaserDrafter, derived from the installed package's Drafter."""
    from faser_trtllm.trtllm.gate import import_module, require_drafter

    release = require_drafter()
    base = import_module(_DRAFTER_MODULE).Drafter

    class FaserDrafter(base):  # type: ignore[misc, valid-type]
        """A drafter with our engine and a draft length per request. Its arguments are those of DrafterOptions.

        The engine is opened on first use, in the drafting process, so the object can be pickled before.
        """

        # Since 1.3, padding comes after the allocation of pages; this makes TensorRT-LLM allocate pages for it.
        _needs_padding_kv_extension = True

        def __init__(self, engine_dir: str | Path, *, max_draft_len: int = 4, **options: Any) -> None:
            paths = {name: Path(options[name]) for name in ("cost_table",) if options.get(name) is not None}
            self.faser_options = DrafterOptions(Path(engine_dir), max_draft_len, **{**options, **paths})
            check_drafter(self.faser_options)
            schedule = self.faser_options.draft_len_schedule
            if schedule is not None and release != "1.2":
                raise ConfigError(
                    f"draft_len_schedule is {dict(schedule)}, and its keys mean something else since {release}; write "
                    "speculation='schedule:1=4,4=2,8=0' instead, where a length applies from its batch size on"
                )
            super().__init__(
                max_draft_len=max_draft_len,
                max_total_draft_tokens=max_draft_len,
                max_concurrency=self.faser_options.max_concurrency,
                draft_len_schedule=None if schedule is None else dict(sorted(schedule.items())),
            )
            self._opened: OpenedDrafter | None = None
            self._has_failed = False
            self._is_checked = False

        def decoding_config(self, max_draft_len: int | None = None) -> Any:
            """Return this drafter's UserProvidedDecodingConfig; raise ConfigError for a different max_draft_len."""
            own = self.faser_options
            if max_draft_len not in (None, own.max_draft_len):
                raise ConfigError(
                    f"max_draft_len is {max_draft_len}, the drafter's is {own.max_draft_len}; give both the same"
                )
            schedule = {} if self.draft_len_schedule is None else {"draft_len_schedule": self.draft_len_schedule}
            make = import_module("tensorrt_llm.llmapi").UserProvidedDecodingConfig
            return make(
                drafter=self,
                resource_manager=sys.modules[__name__].FaserResources(self),
                max_draft_len=own.max_draft_len,
                max_concurrency=own.max_concurrency,
                **schedule,
            )

        def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
            """Fill py_draft_tokens of the generation requests.

            Raises ConfigError if drafts would be wrong: on several GPUs, with a different max_draft_len in the
            configuration, or if a class of TensorRT-LLM lacks recorded members. If drafting itself fails, it proposes
            nothing from then on.
            """
            requests = list(scheduled_requests.generation_requests)
            if not self._is_checked:
                check_one_process(resource_manager)
                for request in requests:
                    check_request(request)
                self._is_checked = self._check_length(requests)
            real = [request for request in requests if not _is_dummy(request)]
            coming = [request for request in scheduled_requests.context_requests if not _is_dummy(request)]
            for request in requests:
                request.py_draft_tokens = []
            for request, proposal in zip(real, self._propose(real, coming), strict=False):
                request.py_draft_tokens = proposal

        def end(self, request: Any) -> None:
            """Free the slot of a request that has ended or was paused."""
            if self._opened is not None and not _is_dummy(request):
                self._opened.core.end(request.py_request_id)

        def shutdown(self) -> None:
            """Free the engine; the next use opens it again."""
            opened, self._opened = self._opened, None
            if opened is not None:
                opened.close()

        def _propose(self, requests: list[Any], coming: list[Any]) -> list[list[int]]:
            if self._has_failed:
                return []
            try:
                if self._opened is None:
                    self._opened = OpenedDrafter(self.faser_options)
                return self._opened.core.propose(list(map(_asked, requests)), list(map(_asked, coming)))
            except Exception:
                log.exception("drafting failed; TensorRT-LLM goes on without drafts")
                self._has_failed = True
                self.shutdown()
                return []

        def _check_length(self, requests: list[Any]) -> bool:
            """Raise ConfigError if a request's room does not fit max_draft_len; return False if none has room yet."""
            rooms = {request.py_draft_pages_allocated for request in requests if not _is_dummy(request)} - {0}
            own = self.faser_options.max_draft_len
            if any(room > own or (room < own and self.draft_len_schedule is None) for room in rooms):
                raise ConfigError(
                    f"max_draft_len of the drafter is {own}, that of speculative_config is {max(rooms)}, so that "
                    "padding would overrun the KV cache; use the drafter's decoding_config()"
                )
            return bool(rooms)

        def __getstate__(self) -> dict[str, Any]:
            return {**self.__dict__, "_opened": None}

    FaserDrafter.__qualname__ = "FaserDrafter"
    return FaserDrafter


def _make_resources() -> type:
    """Return FaserResources, derived from the installed package's BaseResourceManager."""
    from faser_trtllm.trtllm.gate import import_module, require_drafter

    require_drafter()
    base = import_module(_RESOURCE_MODULE).BaseResourceManager

    class FaserResources(base):  # type: ignore[misc, valid-type]
        """A resource manager of TensorRT-LLM that notifies a drafter of ended requests."""

        def __init__(self, drafter: Any) -> None:
            self._drafter = drafter

        def get_max_resource_count(self) -> int:
            """Return the draft's slots; further requests run without drafts, so this limits nothing."""
            options = self._drafter.faser_options
            return options.max_batch_size or EngineDir.load(options.engine_dir).build_config.max_batch_size

        def get_needed_resource_to_completion(self, request: Any) -> int:
            return 0

        def free_resources(self, request: Any) -> None:
            self._drafter.end(request)

        def shutdown(self) -> None:
            self._drafter.shutdown()

    FaserResources.__qualname__ = "FaserResources"
    return FaserResources


def check_request(request: Any) -> None:
    """Raise ConfigError if a request of TensorRT-LLM lacks a field that drafting needs."""
    from faser_trtllm.trtllm.gate import drafter_contract_error

    missing = [name for name in _REQUEST_FIELDS if not hasattr(request, name)]
    if missing:
        raise drafter_contract_error(f"has requests without {' and '.join(missing)}, which FaserDrafter needs")


def check_one_process(resource_manager: Any) -> None:
    """Raise ConfigError if TensorRT-LLM runs the target on more than one GPU.

    The KV cache manager's mapping has the number of GPUs, in both kinds of manager.
    """
    from faser_trtllm.trtllm.gate import drafter_contract_error, import_module

    if resource_manager is None:
        return
    kind = import_module(_RESOURCE_MODULE).ResourceManagerType.KV_CACHE_MANAGER
    manager = resource_manager.get_resource_manager(kind)
    mapping = getattr(manager, "mapping", None)
    missing = [size for size in _PARALLEL_SIZES if not hasattr(mapping, size)]
    if missing:
        found = "no KV cache manager" if manager is None else f"a KV cache manager ({type(manager).__name__})"
        lack = "" if manager is None else f" without mapping.{missing[0]}"
        raise drafter_contract_error(f"has {found}{lack}, so FaserDrafter cannot tell that the target is on one GPU")
    check_parallel_sizes({option: getattr(mapping, size) for size, option in _PARALLEL_SIZES.items()})


def check_parallel_sizes(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option of the LLM API asks for several GPUs (attention DP has as many ranks as TP)."""
    for name in _PARALLEL_SIZES.values():
        size = options.get(name, 1)
        if size not in (None, 1):
            raise ConfigError(
                f"{name} is {size}, and FaserDrafter would draft in each of the processes for itself, with drafts that "
                f"may differ; set {name} to 1, or serve one replica per GPU"
            )


def _is_dummy(request: Any) -> bool:
    """Return True if a request only pads the batch, for attention DP or for a CUDA graph."""
    return any(getattr(request, mark, False) for mark in _DUMMY_MARKS)


def _asked(request: Any) -> Asked:
    token_ids = request.get_tokens(0)
    left = request.py_orig_prompt_len + request.py_max_new_tokens - len(token_ids)
    is_off = getattr(request, "py_disable_speculative_decoding", False)
    max_drafts = 0 if is_off else request.py_draft_pages_allocated
    return Asked(request.py_request_id, token_ids, left, max_drafts)


_MADE: dict[str, Callable[[], type]] = {"FaserDrafter": _make_drafter, "FaserResources": _make_resources}


def __getattr__(name: str) -> Any:
    """Create FaserDrafter and FaserResources on first access, since their base classes import TensorRT-LLM."""
    if name not in _MADE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = _MADE[name]()
    return made
