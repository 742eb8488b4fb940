"""FaserDrafter: a drafter for TensorRT-LLM's UserProvidedDecodingConfig. Contract-tested, not run against TensorRT-LLM.

TensorRT-LLM gives every request room for max_draft_len drafts, asks the drafter, and pads what it proposes to that
length with zeros: padding can only be rejected, or be what the target says anyway. So a shorter proposal saves
drafting, not verifying, and pages need no care of ours.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.core.clock import MonotonicClock
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.engine.base import Engine
from faser_trtllm.engine.cpu import CpuEngine
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.cuda_engines import CudaGpu, Gpu, open_cuda_draft
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.policy.registry import check_spelling, make_policy, needs_costs
from faser_trtllm.trtllm.drafter_core import Asked, DraftCore, num_pending_drafts

if TYPE_CHECKING:
    FaserDrafter: Any

log = logging.getLogger(__name__)

_DRAFTER_MODULE = "tensorrt_llm._torch.speculative.drafter"


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """What FaserDrafter is told.

    engine_dir: of `faser build` with a draft; its target is not used. speculation: a policy, as in faser.yaml; "" is
    price with a cost table, else fixed:max_draft_len. cost_table: a profile.json whose verify times are the target's.
    cores, num_threads: of a draft on the CPU; keep TensorRT-LLM's own threads off them. A draft of the cuda backend has
    a green context of its own.
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

    @property
    def policy(self) -> str:
        return self.speculation or ("price" if self.cost_table is not None else f"fixed:{self.max_draft_len}")


class OpenedDrafter:
    """The engine, the policy and the core of one drafter; close() frees them."""

    def __init__(self, options: DrafterOptions, open_gpu: Callable[[], AbstractContextManager[Gpu]] = CudaGpu) -> None:
        """open_gpu: for a draft of the cuda backend. Raises ConfigError or EngineFileError in one sentence."""
        with ExitStack() as stack:
            self.core = _open(options, open_gpu, stack)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()


def check_drafter(options: DrafterOptions) -> None:
    """Raise for options that cannot work, without opening an engine: ConfigError, EngineFileError."""
    engines = EngineDir.load(options.engine_dir)
    if not engines.has_draft:
        raise ConfigError(f"{options.engine_dir} has no draft engine; build one with --draft_checkpoint_dir")
    if engines.backend not in ("cpu", "cuda"):
        raise ConfigError(
            f"{options.engine_dir} is of the backend {engines.backend}, inside TensorRT-LLM a cpu or cuda draft runs; "
            "build with --backend cpu or cuda"
        )
    if options.max_draft_len < 1:
        raise ConfigError(f"max_draft_len is {options.max_draft_len}, it must be at least 1")
    check_spelling(options.policy, options.max_draft_len)
    if needs_costs(options.policy) and options.cost_table is None:
        raise ConfigError(f"speculation is {options.policy}, which needs a cost_table; name one or use fixed:K")


def _open(options: DrafterOptions, open_gpu: Callable[[], AbstractContextManager[Gpu]], stack: ExitStack) -> DraftCore:
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
    engine: Engine
    if engines.backend == "cuda":
        engine = open_cuda_draft(engines, limits, num_blocks, stack.enter_context(open_gpu()), stack)
    else:
        core_set = stack.enter_context(CoreSet(options.cores, options.num_threads))
        engine = stack.enter_context(
            CpuEngine.open(
                engines.draft_path,
                core_set,
                num_blocks=num_blocks,
                tokens_per_block=limits.tokens_per_block,
                max_batch_size=limits.max_batch_size,
                max_num_tokens=limits.max_num_tokens,
                max_seq_len=limits.max_seq_len,
            )
        )
    core = DraftCore(
        engine, policy, MonotonicClock(), max_draft_len=options.max_draft_len, draft_ahead=options.draft_ahead
    )
    stack.callback(core.close)
    return core


def _read_costs(path: Path) -> CostTable:
    """Of any machine: the target's times are not this engine directory's."""
    try:
        return CostTable.from_json(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the cost table {path.name} cannot be read ({error}); run `faser profile`") from error


def _make_class() -> type:
    """FaserDrafter, over the installed package's Drafter."""
    from faser_trtllm.trtllm.gate import import_module, require_tensorrt_llm

    require_tensorrt_llm()
    base = import_module(_DRAFTER_MODULE).Drafter

    class FaserDrafter(base):  # type: ignore[misc, valid-type]
        """Proposes drafts of our engine, of each request's own length. Arguments: those of DrafterOptions.

        The engine is opened at the first use, in the process that drafts, so the object may be pickled before.
        """

        def __init__(self, engine_dir: str | Path, *, max_draft_len: int = 4, **options: Any) -> None:
            super().__init__(max_draft_len=max_draft_len, max_total_draft_tokens=max_draft_len)
            paths = {name: Path(options[name]) for name in ("cost_table",) if options.get(name) is not None}
            self.faser_options = DrafterOptions(Path(engine_dir), max_draft_len, **{**options, **paths})
            check_drafter(self.faser_options)
            self._opened: OpenedDrafter | None = None
            self._has_failed = False

        def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
            """Fill py_draft_tokens of the generation requests. It never raises: who cannot draft proposes nothing."""
            requests = list(scheduled_requests.generation_requests)
            proposals: list[list[int]] = [[] for _ in requests]
            if not self._has_failed:
                try:
                    if self._opened is None:
                        self._opened = OpenedDrafter(self.faser_options)
                    coming = scheduled_requests.context_requests
                    proposals = self._opened.core.propose(list(map(_asked, requests)), list(map(_asked, coming)))
                except Exception:
                    log.exception("drafting failed; TensorRT-LLM goes on without drafts")
                    self._has_failed = True
                    self.shutdown()
            for request, proposal in zip(requests, proposals, strict=True):
                request.py_draft_tokens = proposal

        def shutdown(self) -> None:
            """Free the engine; the next use opens it again."""
            opened, self._opened = self._opened, None
            if opened is not None:
                opened.close()

        def __getstate__(self) -> dict[str, Any]:
            return {**self.__dict__, "_opened": None}

    FaserDrafter.__qualname__ = "FaserDrafter"
    return FaserDrafter


def _asked(request: Any) -> Asked:
    token_ids = request.get_tokens(0)
    left = request.py_orig_prompt_len + request.py_max_new_tokens - len(token_ids)
    is_off = getattr(request, "py_disable_speculative_decoding", False)  # not confirmed for 1.2
    max_drafts = 0 if is_off else request.py_draft_pages_allocated
    return Asked(request.py_request_id, token_ids, left, max_drafts)


def __getattr__(name: str) -> Any:
    """FaserDrafter stands on a class of TensorRT-LLM, which is imported when it is first asked for."""
    if name != "FaserDrafter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = _make_class()
    return made
