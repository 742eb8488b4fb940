"""Open the engines of a cpu engine directory on one core set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.engine.cpu.engine import CpuEngine
from faser_trtllm.engine.modes import Modes
from faser_trtllm.engine.opening import OpenedEngines, OpenRequest, cpu_sampler
from faser_trtllm.errors import ConfigError
from faser_trtllm.partition.core_set import CoreSet


def open_engines(request: OpenRequest, stack: ExitStack) -> OpenedEngines:
    """See engine.opening.open_engines. Both engines run on request.core_set, except in modes that divide its cores."""
    core_set = request.core_set
    assert core_set is not None, "cpu engines run on a core set"
    target = _open(request.engines.target_path, request, stack, request.num_branches * request.limits.max_batch_size)
    draft = _open(request.engines.draft_path, request, stack) if request.drafting else None
    if draft is not None and draft.spec.reads_target:
        draft.attach(target)

    @functools.cache
    def shares() -> tuple[CoreSet, CoreSet]:
        """Return the target's core set, of all cores but one, and the draft's, of one; a single core serves both."""
        target_cores = stack.enter_context(CoreSet(None, max(1, core_set.num_threads - 1)))
        return target_cores, stack.enter_context(CoreSet(None, 1))

    return OpenedEngines(
        target,
        draft,
        Modes(target, draft, core_set, shares).enter,
        cpu_sampler(request),
        copy_kv=target.copy_kv,
        prepare_draft=None if draft is None else functools.partial(_prepare_draft, request, target, draft),
    )


def _prepare_draft(request: OpenRequest, target: CpuEngine, draft: CpuEngine, path: Path) -> Callable[[], None]:
    engines = EngineDir.load(path)
    if engines.target_sha256 != request.engines.target_sha256:
        raise ConfigError(f"the target in {path} is not the one that runs; build the draft for the running target")
    if not engines.has_draft or engines.draft_head != request.engines.draft_head:
        raise ConfigError(
            f"the draft in {path} is {engines.draft_head or ('a model' if engines.has_draft else 'missing')}; it must "
            f"be of the running draft's kind ({request.engines.draft_head or 'a model'}); build one of that kind"
        )
    max_seq_len = request.limits.max_seq_len
    window, running = (min(each.draft_window or max_seq_len, max_seq_len) for each in (engines, request.engines))
    if window != running:
        raise ConfigError(
            f"the draft in {path} drafts for at most {window} tokens, the running draft for {running}; build one with "
            "that context length or start the server again"
        )
    with ExitStack() as stack:
        other = _open(engines.draft_path, request, stack)
        opened = stack.pop_all()

    def put() -> None:
        with opened:  # closes the old draft, which exchange() leaves in `other`
            if other.spec.reads_target:
                other.attach(target)
            other.use(draft.core_set)
            draft.exchange(other)

    return put


def open_draft(request: OpenRequest, stack: ExitStack) -> CpuEngine:
    return _open(request.engines.draft_path, request, stack)


def _open(path: Path, request: OpenRequest, stack: ExitStack, max_num_branches: int = 0) -> CpuEngine:
    assert request.core_set is not None, "cpu engines run on a core set"
    limits = request.limits
    return stack.enter_context(
        CpuEngine.open(
            path,
            request.core_set,
            num_blocks=request.num_blocks,
            tokens_per_block=limits.tokens_per_block,
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            max_num_branches=max_num_branches,
        )
    )
