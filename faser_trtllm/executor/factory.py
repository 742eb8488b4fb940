"""Functions that open an engine directory and assemble an executor of engines, cache, scheduler and policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from faser_trtllm.builder.engine_dir import EngineDir
from faser_trtllm.config import DrafterName, ExecutorConfig
from faser_trtllm.core.clock import Clock, MonotonicClock
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import Mode
from faser_trtllm.drafters.base import Drafter
from faser_trtllm.drafters.cascade import Cascade
from faser_trtllm.drafters.model import ModelDrafter
from faser_trtllm.drafters.suffix import SuffixDrafter
from faser_trtllm.engine.base import Engine
from faser_trtllm.engine.opening import Opener, OpenRequest, open_engines, stay
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.admission import Admission
from faser_trtllm.executor.batching import make_batching
from faser_trtllm.executor.branches import BranchRows, CopyKv
from faser_trtllm.executor.draft_worker import DraftStage, DraftWorker
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.guard import GuardedDrafter, GuardedPolicy, SpeculationGuard
from faser_trtllm.executor.settings import (
    choose_costs,
    choose_drafters,
    choose_limits,
    cost_gauges,
    may_branch,
    no_branches,
    policy_of,
)
from faser_trtllm.executor.trace import TraceWriter
from faser_trtllm.executor.verifier import Verifier
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.policy.base import Policy
from faser_trtllm.policy.registry import may_overlap
from faser_trtllm.policy.static import OffPolicy
from faser_trtllm.sampling.draft_probs import HostDraftProbs
from faser_trtllm.sampling.rejection import CpuRejectionSampler, RejectionSampler
from faser_trtllm.sampling.synthetic_accept import SyntheticRejectionSampler, place_probabilities
from faser_trtllm.sampling.table import SamplingTable
from faser_trtllm.scheduler.limits import SchedulerLimits

log = logging.getLogger(__name__)

MAX_LOGIT_ROWS = 64
"""Rows with logits per pass, unless drafts need more. Prompts with log probs are split so that logits fit in memory."""

SYNTHETIC_WARNING = "synthetic_acceptance is on: OUTPUTS ARE NOT THE TARGET'S"

WorkerMaker = Callable[[DraftStage, Callable[[Mode], None]], DraftWorker]
EngineWrapper = Callable[[Engine, str], Engine]
"""Wraps an engine of a role, "target" or "draft"."""


@dataclass(frozen=True)
class Simulation:
    """The wrappers of engines and draft worker in a simulation (lab/simulation/), and the costs of its policy."""

    wrap_engine: EngineWrapper
    make_worker: WorkerMaker
    costs: CostTable


def open_executor(
    engine_dir: Path,
    config: ExecutorConfig,
    clock: Clock | None = None,
    wrap_policy: Callable[[Policy], Policy] = lambda policy: policy,
    simulation: Simulation | None = None,
    opener: Opener = open_engines,
    wrap_engine: EngineWrapper = lambda engine, role: engine,
    draft_timeout_ms: float | None = None,
) -> Executor:
    """Open the engines and return an executor that is not started yet; close() frees everything.

    wrap_policy: wraps the policy, to watch its decisions and outcomes.
    simulation: take times from a cost table.
    opener: opens the engines.
    wrap_engine: wraps both engines, unless there is a simulation, which has its own.
    draft_timeout_ms: go on without drafts if drafting fails or takes longer (executor/guard.py); None: raise.

    Raises ConfigError if the configuration exceeds the limits of the engines or a GPU is missing, and EngineFileError
    if the directory is not usable.
    """
    engines = EngineDir.load(engine_dir)
    limits, num_blocks = choose_limits(engines, config)
    max_batch_size, max_draft_len = limits.max_batch_size, limits.max_draft_len
    with ExitStack() as guard:
        stack = guard.enter_context(ExitStack())
        core_set = stack.enter_context(CoreSet(config.cores, config.num_threads))
        policy: Policy = OffPolicy()
        gauges: dict[str, float] = {}
        config = config.model_copy(update={"drafters": choose_drafters(engines, config)})
        if config.drafters and max_draft_len:
            if simulation is not None:
                costs: CostTable | None = simulation.costs
            else:
                costs = choose_costs(engine_dir, config.speculation, core_set.num_threads)
            policy = policy_of(config.speculation, max_draft_len, max_batch_size, costs, config.drafters)
            gauges = cost_gauges(costs)
        drafting = policy.name != "off"
        max_draft_len = max_draft_len if drafting else 0
        policy = wrap_policy(policy)

        opened = opener(
            OpenRequest(
                engines,
                replace(limits, max_draft_len=max_draft_len),
                num_blocks,
                drafting=drafting and DrafterName.MODEL in (config.drafters or ()),
                core_set=core_set,
                quantization=config.quantization,
                deterministic=config.deterministic,
                kv_memory_fraction=config.kv_cache_config.free_gpu_memory_fraction,
                kv_dtype=config.kv_cache_config.dtype,
                num_branches=min(config.num_branches, max_draft_len),  # one in the place of each draft, at most
                gpu_partitions=config.gpu_partitions,
                overlap=may_overlap(config.speculation),
            ),
            stack,
        )
        wrap = simulation.wrap_engine if simulation else wrap_engine
        trace = stack.enter_context(TraceWriter(Path(config.trace_file))) if config.trace_file else None
        executor = assemble(
            wrap(opened.target, "target"),
            None if opened.draft is None else wrap(opened.draft, "draft"),
            policy,
            config,
            max_seq_len=limits.max_seq_len,
            max_draft_len=max_draft_len,
            clock=clock or MonotonicClock(),
            resources=stack,
            enter_mode=opened.enter_mode,
            trace=trace,
            make_worker=simulation.make_worker if simulation else DraftWorker,
            sampler=opened.sampler,
            draft_timeout_ms=draft_timeout_ms,
            copy_kv=opened.copy_kv,
            prepare_draft=opened.prepare_draft,
            gauges=gauges,
            draft_window=engines.draft_window,
        )
        guard.pop_all()  # from here on the executor owns what was opened
        return executor


def refuse_overlap(mode: Mode) -> None:
    """Raise ConfigError for overlapped modes: without partitions, two passes on one core set's threads would hang."""
    if mode is not Mode.SERIAL:
        raise ConfigError(
            f"mode is {mode.value}, but nothing moves target and draft apart for it; give assemble() their opener's "
            "enter_mode, or speculate with mode=serial"
        )


def assemble(
    target: Engine,
    draft: Engine | None,
    policy: Policy,
    config: ExecutorConfig,
    *,
    max_seq_len: int,
    max_draft_len: int,
    clock: Clock,
    resources: ExitStack | None = None,
    enter_mode: Callable[[Mode], None] = refuse_overlap,
    trace: TraceWriter | None = None,
    make_worker: WorkerMaker = DraftWorker,
    sampler: RejectionSampler | None = None,
    draft_timeout_ms: float | None = None,
    wrap_drafter: Callable[[Drafter], Drafter] = lambda drafter: drafter,
    copy_kv: CopyKv | None = None,
    prepare_draft: Callable[[Path], Callable[[], None]] | None = None,
    gauges: Mapping[str, float] | None = None,
    draft_window: int | None = None,
) -> Executor:
    """Make an executor of open engines. They share block ids, so they need equal numbers of blocks of the same size.

    enter_mode: moves the engines when the mode changes (`stay` of engine/opening.py if they need not move); without it,
        overlapped modes raise ConfigError.
    sampler: for the target's logits and the same max_draft_len; None: for logits in host memory, on the calling thread.
    draft_timeout_ms: see open_executor.
    wrap_drafter: wraps every drafter, for deliberate faults.
    copy_kv: see OpenedEngines; needed for token trees.
    prepare_draft: see OpenedEngines.
    gauges: constant gauges of Executor.stats().
    draft_window: longest context that the draft model drafts for; None: max_seq_len.

    Raises ConfigError if the settings do not allow token trees.
    """
    spec = target.spec
    assert draft is None or (draft.spec.num_blocks, draft.spec.tokens_per_block) == (
        spec.num_blocks,
        spec.tokens_per_block,
    )
    limits = SchedulerLimits(
        max_batch_size=spec.max_batch_size,
        max_num_tokens=spec.max_num_tokens,
        max_seq_len=max_seq_len,
        max_draft_len=max_draft_len,
        capacity_policy=config.scheduler_config.capacity_scheduler_policy,
        enable_chunked_context=config.scheduler_config.enable_chunked_context,
        chunk_unit_size=config.scheduler_config.chunk_unit_size,
        max_logit_rows=min(
            spec.max_logit_rows or spec.max_num_tokens, max(MAX_LOGIT_ROWS, spec.max_batch_size * (1 + max_draft_len))
        ),
        # A draft model runs the last draft if all were accepted; heads and block drafters run all accepted ones again.
        max_draft_rows=2 + max_draft_len if draft is not None and draft.spec.reads_target else 2,
    )
    resources = resources or ExitStack()
    if sampler is None:
        draft_probs = HostDraftProbs(spec.max_batch_size, 0 if draft is None else max_draft_len, spec.vocab_size)
        sampler = CpuRejectionSampler(spec.vocab_size, max_draft_len, draft_probs)
    sampling = SamplingTable(
        spec.max_batch_size, spec.vocab_size, max_draft_len, draft_probs=sampler.draft_probs, clock=clock
    )
    drafters: list[Drafter] = []
    searches = DrafterName.SUFFIX in (config.drafters or ())
    if max_draft_len:
        drafters.append(
            SuffixDrafter(
                sampling,
                max_seq_len,
                has_model=draft is not None,
                resources=resources,
                only_predictions=not searches,
            )
        )
    guard: SpeculationGuard | None = None
    if max_draft_len and draft_timeout_ms is not None:
        guard = SpeculationGuard(
            clock, draft_timeout_ms, limits.max_draft_rows, forget_draft_kv=lambda: scheduler.forget_draft_kv()
        )
        policy = GuardedPolicy(policy, guard)
    if draft is None or (draft_window is not None and draft_window >= max_seq_len):
        draft_window = None
    kv, scheduler = make_batching(config)(spec, limits, policy, clock)
    if draft is not None:
        drafters.append(ModelDrafter(draft, sampling, kv.block_table, max_draft_len, clock))
    drafters = [wrap_drafter(drafter) for drafter in drafters]
    cascade = Cascade(drafters, sampling, spec.vocab_size, clock, draft_window)
    stage: DraftStage = cascade if guard is None else GuardedDrafter(cascade, guard)
    worker = make_worker(stage, stay if draft is None else enter_mode)  # a target alone need not move
    worker.register(resources)
    is_synthetic = config.synthetic_acceptance is not None
    if config.synthetic_acceptance is not None:
        probabilities = place_probabilities(config.synthetic_acceptance, max_draft_len)
        sampler = SyntheticRejectionSampler(sampler, probabilities, config.synthetic_acceptance_seed)
        log.warning("%s (%s)", SYNTHETIC_WARNING, config.synthetic_acceptance)
    branches: BranchRows | None = None
    if config.num_branches and max_draft_len:
        if copy_kv is None or not may_branch(config, draft is not None):
            raise no_branches(config.num_branches)
        branches = BranchRows(spec, copy_kv, sampling, kv.block_table, config.num_branches, max_draft_len)
    admission = Admission(
        spec.vocab_size,
        max_seq_len,
        max_draft_len,
        drafters=tuple(drafter.spec.name for drafter in drafters if searches or drafter.spec.has_kv),
        keep_candidates=len(spec.segments) > 2,  # early exit compares with them
        keep_runners_up=branches is not None,  # the branches' tokens
        is_synthetic=is_synthetic,
        draft_window=draft_window,
    )
    fixed_gauges = dict(gauges or {}) | ({"synthetic_acceptance": 1.0} if is_synthetic else {})
    executor = Executor(
        scheduler,
        worker,
        Verifier(target, sampling, kv.block_table, clock, sampler, branches),
        sampling,
        clock,
        admission,
        max_queue_size=config.max_queue_size,
        resources=resources,
        drafters=drafters,
        gauges=lambda: fixed_gauges if guard is None else fixed_gauges | guard.gauges(),
        prepare_draft=prepare_draft,
    )
    for watcher in (guard, trace):
        if watcher is not None:
            executor.watch(watcher)
    return executor
