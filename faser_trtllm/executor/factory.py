"""Opens an engine directory: partition, engines, cache, scheduler and policy, put together as one executor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.builder.engine_dir import BuildConfig, EngineDir
from faser_trtllm.config import ExecutorConfig, Quantization
from faser_trtllm.core.clock import Clock, MonotonicClock
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import Mode
from faser_trtllm.engine.base import Engine
from faser_trtllm.engine.cpu import CpuEngine
from faser_trtllm.engine.fingerprint import PROFILE, fingerprint_of
from faser_trtllm.errors import ConfigError
from faser_trtllm.executor.batching import check_scheduler, make_kv_cache, make_scheduler
from faser_trtllm.executor.cuda_engines import CudaGpu, open_cuda_engines
from faser_trtllm.executor.drafter import Drafter, NoDrafter
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.guard import GuardedDrafter, GuardedPolicy, SpeculationGuard
from faser_trtllm.executor.lanes import DraftLane, DraftStage
from faser_trtllm.executor.partitions import Partitions
from faser_trtllm.executor.tensorrt_engines import Interpretation, open_tensorrt_engines
from faser_trtllm.executor.trace import TraceWriter
from faser_trtllm.executor.verifier import DeviceTester, SyntheticAcceptance, Verifier
from faser_trtllm.partition.core_set import CoreSet
from faser_trtllm.policy.base import Policy
from faser_trtllm.policy.off import OffPolicy
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.sampling.table import SamplingTable
from faser_trtllm.scheduler.scheduler import SchedulerLimits

log = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 4 << 30  # touched as it fills, so a short life costs little


SYNTHETIC_WARNING = "synthetic_acceptance is on: OUTPUTS ARE NOT THE TARGET'S"

LaneMaker = Callable[[DraftStage, Callable[[Mode], None]], DraftLane]
EngineWrapper = Callable[[Engine, str], Engine]
"""Puts something around an engine of a role, "target" or "draft"."""


@dataclass(frozen=True)
class Simulation:
    """What a simulation (faser_trtllm/sim) puts around engines and lanes, and the costs that its policy goes by."""

    wrap_engine: EngineWrapper
    make_lane: LaneMaker
    costs: CostTable


def open_executor(
    engine_dir: Path,
    config: ExecutorConfig,
    clock: Clock | None = None,
    wrap_policy: Callable[[Policy], Policy] = lambda policy: policy,
    simulation: Simulation | None = None,
    interpretation: Interpretation | None = None,
    wrap_engine: EngineWrapper = lambda engine, role: engine,
    draft_timeout_ms: float | None = None,
) -> Executor:
    """Open the engines and return an executor that is not started yet; close() frees everything.

    wrap_policy: puts something around the policy, to watch its decisions and outcomes.
    simulation: take times from a cost table.
    interpretation: run a TensorRT directory's networks on the CPU, from the checkpoints it was built from.
    wrap_engine: puts something around both engines (a simulation has its own).
    draft_timeout_ms: go on without drafts where drafting fails or takes longer (executor/guard.py); None: raise.

    Raises ConfigError where the configuration asks for more than the engines were built for or a GPU is missing, and
    EngineFileError where the directory is not usable.
    """
    check_scheduler(config)
    engines = EngineDir.load(engine_dir)
    built = engines.build_config
    max_batch_size = _limit("max_batch_size", config.max_batch_size, built.max_batch_size)
    max_num_tokens = _limit("max_num_tokens", config.max_num_tokens, built.max_num_tokens)
    max_seq_len = _limit("max_seq_len", config.max_seq_len, built.max_seq_len)
    max_draft_len = _limit("max_draft_len", config.max_draft_len, built.max_draft_len)
    if max_num_tokens < max_batch_size:
        raise ConfigError(
            f"max_num_tokens is {max_num_tokens}, it must be at least max_batch_size ({max_batch_size}), one row each"
        )
    if config.quantization is not Quantization.NONE and engines.backend != "cuda":
        raise ConfigError(
            f"quantization is {config.quantization.value}, {engine_dir} holds {engines.backend} engines, which run as "
            "they were built; set it to none or build with --backend cuda"
        )
    tokens_per_block = built.tokens_per_block
    max_blocks_per_seq = -(-max_seq_len // tokens_per_block)
    num_blocks = _num_blocks(config, engines.kv_bytes_per_token, max_batch_size, max_blocks_per_seq, tokens_per_block)
    with ExitStack() as guard:
        stack = guard.enter_context(ExitStack())
        core_set = stack.enter_context(CoreSet(config.cores, config.num_threads))
        policy: Policy = OffPolicy()
        if engines.has_draft:
            costs = simulation.costs if simulation else None
            num_threads = core_set.num_threads
            policy = choose_policy(engine_dir, config.speculation, num_threads, max_draft_len, max_batch_size, costs)
        drafting = policy.name != "off"
        max_draft_len = max_draft_len if drafting else 0
        policy = wrap_policy(policy)

        def open_engine(path: Path) -> CpuEngine:
            return stack.enter_context(
                CpuEngine.open(
                    path,
                    core_set,
                    num_blocks=num_blocks,
                    tokens_per_block=tokens_per_block,
                    max_batch_size=max_batch_size,
                    max_num_tokens=max_num_tokens,
                    max_seq_len=max_seq_len,
                )
            )

        target: Engine
        draft: Engine | None
        enter_mode: Callable[[Mode], None]
        device_tester: DeviceTester | None = None
        if engines.backend == "cpu":
            if interpretation is not None:
                raise ConfigError(f"{engine_dir} holds cpu engines, which run as they are; leave --interpret out")
            target = cpu_target = open_engine(engines.target_path)
            draft = cpu_draft = open_engine(engines.draft_path) if drafting else None
            enter_mode = Partitions(core_set, cpu_target, cpu_draft, core_set.num_threads, stack).enter
        elif engines.backend == "cuda":
            if interpretation is not None:
                raise ConfigError(f"{engine_dir} holds cuda engines, which run as they are; leave --interpret out")
            limits = BuildConfig(max_batch_size, max_num_tokens, max_seq_len, max_draft_len, tokens_per_block)
            gpu = stack.enter_context(CudaGpu())
            on_gpu = open_cuda_engines(engines, limits, num_blocks, drafting, gpu, stack, config.quantization)
            target, draft, enter_mode = on_gpu.target, on_gpu.draft, on_gpu.enter_mode
            device_tester = on_gpu.tester
        else:
            limits = BuildConfig(max_batch_size, max_num_tokens, max_seq_len, max_draft_len, tokens_per_block)
            opened = open_tensorrt_engines(engines, limits, num_blocks, drafting, interpretation, stack)
            target, draft, enter_mode = opened.target, opened.draft, opened.enter_mode
        wrap = simulation.wrap_engine if simulation else wrap_engine
        trace = stack.enter_context(TraceWriter(Path(config.trace_file))) if config.trace_file else None
        executor = assemble(
            wrap(target, "target"),
            None if draft is None else wrap(draft, "draft"),
            policy,
            config,
            max_seq_len=max_seq_len,
            max_draft_len=max_draft_len,
            clock=clock or MonotonicClock(),
            resources=stack,
            enter_mode=enter_mode,
            trace=trace,
            pool=core_set.handle,
            make_lane=simulation.make_lane if simulation else DraftLane,
            device_tester=device_tester,
            draft_timeout_ms=draft_timeout_ms,
        )
        guard.pop_all()  # from here on the executor closes what was opened
        return executor


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
    enter_mode: Callable[[Mode], None] | None = None,
    trace: TraceWriter | None = None,
    pool: int | None = None,
    make_lane: LaneMaker = DraftLane,
    device_tester: DeviceTester | None = None,
    draft_timeout_ms: float | None = None,
) -> Executor:
    """An executor over engines that are open; both share block ids, so they have as many blocks of the same size.

    enter_mode: moves the engines when the mode changes; None: they stay where they are, and a mode that overlaps raises
    ConfigError if that is one core set. pool: a core set's handle, whose threads share the free test; None: the calling
    thread alone. device_tester: where the target's logits stay on the device. draft_timeout_ms: as in open_executor.
    """
    spec = target.spec
    assert draft is None or (draft.spec.num_blocks, draft.spec.tokens_per_block) == (
        spec.num_blocks,
        spec.tokens_per_block,
    )
    check_scheduler(config)
    kv = make_kv_cache(config, spec, max_seq_len)
    limits = SchedulerLimits(
        max_batch_size=spec.max_batch_size,
        max_num_tokens=spec.max_num_tokens,
        max_seq_len=max_seq_len,
        max_draft_len=max_draft_len,
        capacity_policy=config.scheduler_config.capacity_scheduler_policy,
        enable_chunked_context=config.scheduler_config.enable_chunked_context,
        chunk_unit_size=config.scheduler_config.chunk_unit_size,
    )
    sampling = SamplingTable(spec.max_batch_size, spec.vocab_size, max_draft_len)
    resources = resources or ExitStack()
    stage: DraftStage = NoDrafter()
    guard: SpeculationGuard | None = None
    if draft is not None:
        stage = Drafter(draft, sampling, kv.block_table, max_draft_len, clock)
        if draft_timeout_ms is not None:
            guard = SpeculationGuard(clock, draft_timeout_ms)
            stage, policy = GuardedDrafter(stage, guard), GuardedPolicy(policy, guard)
    drafter = make_lane(stage, enter_mode or _stay(target, draft))
    drafter.register(resources)
    synthetic = None
    if config.synthetic_acceptance is not None:
        synthetic = SyntheticAcceptance(config.synthetic_acceptance, config.synthetic_acceptance_seed)
        log.warning("%s (%s)", SYNTHETIC_WARNING, config.synthetic_acceptance)
    return Executor(
        make_scheduler(config, kv, limits, policy, clock),
        drafter,
        Verifier(target, sampling, policy, kv.block_table, max_draft_len, clock, pool, device_tester, synthetic),
        sampling,
        clock,
        vocab_size=spec.vocab_size,
        max_seq_len=max_seq_len,
        max_draft_len=max_draft_len,
        max_queue_size=config.max_queue_size,
        resources=resources,
        trace=trace,
        keep_candidates=len(spec.segments) > 2,
        guard=guard,
    )


def _stay(target: Engine, draft: Engine | None) -> Callable[[Mode], None]:
    """An enter_mode for engines that nobody moves; two lanes on the threads of one core set hang."""

    def enter(mode: Mode) -> None:
        if mode is Mode.SERIAL or not (isinstance(target, CpuEngine) and isinstance(draft, CpuEngine)):
            return
        if target.core_set is draft.core_set:
            raise ConfigError(
                f"mode is {mode.value}, and target and draft share one core set; give assemble() an enter_mode that "
                "moves them (Partitions.enter), or speculate with mode=serial"
            )

    return enter


def choose_policy(
    engine_dir: Path,
    speculation: str,
    num_threads: int,
    max_draft_len: int,
    max_batch_size: int,
    costs: CostTable | None = None,
) -> Policy:
    """The policy of a configuration's spelling, with a cost table where it needs one: costs, else the directory's.

    "auto" is price if there is a table that fits this machine, else fixed:4. Raises ConfigError for a spelling that is
    wrong, or that needs a table which is missing or was measured elsewhere.
    """
    path = engine_dir / PROFILE
    if speculation.startswith(("off", "fixed", "schedule:")):
        costs = None
    elif costs is None and path.exists():
        try:
            costs = CostTable.load(path, fingerprint_of(engine_dir, num_threads))
        except ConfigError as error:
            if speculation != "auto":
                raise
            log.warning("%s; speculating with fixed:4 until then", error)
            costs = None
    if speculation == "auto":
        speculation = "price" if costs is not None else f"fixed:{min(4, max_draft_len)}"
    return make_policy(speculation, max_draft_len, costs, max_batch_size)


def _limit(name: str, wanted: int | None, built: int) -> int:
    if wanted is None:
        return built
    if wanted > built:
        raise ConfigError(
            f"{name} is {wanted}, the engines were built for {built}; lower it or rebuild with --{name} {wanted}"
        )
    return wanted


def _num_blocks(
    config: ExecutorConfig,
    kv_bytes_per_token: int,
    max_batch_size: int,
    max_blocks_per_seq: int,
    tokens_per_block: int,
) -> int:
    max_tokens = config.kv_cache_config.max_tokens
    if max_tokens is not None:
        if max_tokens < tokens_per_block:
            raise ConfigError(
                f"kv_cache_config.max_tokens is {max_tokens}, it must hold at least one block of {tokens_per_block}"
            )
        return max_tokens // tokens_per_block
    affordable = DEFAULT_KV_BYTES // (kv_bytes_per_token * tokens_per_block)
    return max(max_blocks_per_seq, min(max_batch_size * max_blocks_per_seq, affordable))
