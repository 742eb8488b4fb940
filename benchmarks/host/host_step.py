"""One measurement of the time of an executor's steps, by part, with engines that compute nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.host.gpu_engines import GpuEngines, HostClock, open_gpu_engines
from benchmarks.host.null_engines import VOCAB_SIZE, NullEngine
from benchmarks.host.options import GPU, NULL, split_system
from faser_trtllm import native
from faser_trtllm.config import DrafterName, ExecutorConfig, KvCacheConfig
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import Decision, Mode, PlanStats, StepView
from faser_trtllm.core.plan import RequestOutput, SchedulerOutput
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch, Engine, EngineSpec
from faser_trtllm.engine.gpu.sampler.accept import GpuRejectionSampler
from faser_trtllm.engine.opening import stay
from faser_trtllm.executor.draft_worker import Drafting, DraftStage, DraftWorker
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import assemble
from faser_trtllm.ops.accept import AcceptResult
from faser_trtllm.policy.base import Policy
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.sampling.rejection import BranchTokens, VerificationRows
from lab.clock import ManualClock
from lab.delegating_engine import DelegatingEngine
from lab.simulation.priced_engine import PricedEngine

PARTS = {
    NULL: ("schedule", "policy", "draft batch", "batch", "commit", "output"),
    GPU: ("schedule", "policy", "draft batch", "draft engine", "batch", "target engine", "test", "commit", "output"),
}
"""Parts of a step by engines.

schedule: rows and blocks. policy: its plans. draft batch, batch: inputs of the two passes. commit: from the pass to the
first output, with rejection sampling, tokens, blocks and ended requests. output: sinks, then statistics. For GPU
engines also the host's part of their calls, and of rejection sampling (test), which is then not in commit.
"""

PROMPT_LEN, TOKENS_PER_BLOCK = 32, 32
WARM_UP_STEPS = 40  # until price has learnt and caches are warm


class StepCosts(NamedTuple):
    """Microseconds by part, and idle microseconds of the device of GPU engines, None for other engines."""

    parts_us: Mapping[str, float]
    idle_us: float | None


def measure_step(
    system: str,
    num_requests: int,
    costs: CostTable,
    *,
    num_steps: int,
    acceptance: float,
    max_draft_len: int,
    seed: int = 0,
    engines: str = NULL,
) -> StepCosts:
    """Return the mean over num_steps steps in which num_requests requests decode.

    system, engines: as in HostBenchOptions. The policy's clock follows the cost table, so that it decides as on that
    machine.
    """
    watch = Stopwatch(engines)
    max_new_tokens = (WARM_UP_STEPS + num_steps + 2) * (max_draft_len + 1)
    with open_executor(system, num_requests, costs, watch, max_new_tokens, acceptance, max_draft_len, seed) as executor:
        params = SamplingParams(max_tokens=max_new_tokens, temperature=0.0)
        for number in range(num_requests):
            executor.submit(str(number), [0] * PROMPT_LEN, params, watch.sink)
        for _ in range(WARM_UP_STEPS):
            executor.step()
        with _without_collector():
            watch.clear()
            for _ in range(num_steps):
                watch.begin()
                executor.step()
                watch.end()
        assert executor.stats()["num_scheduled"] == num_requests, "a request ended while it was measured"
    parts_us = {part: 1e6 * seconds / num_steps for part, seconds in watch.seconds.items()}
    return StepCosts(parts_us, 1e6 * watch.clock.idle_s / num_steps if engines == GPU else None)


def measure_reference(num_requests: int, num_drafts: int, num_steps: int) -> float:
    """Return microseconds per step of the loop in C, including its allocations."""
    begun_s = time.process_time()
    found = native.library().faser_host_loop(num_requests, num_drafts, num_steps, 1)
    taken_s = time.process_time() - begun_s
    native.check(min(found, 0), "the loop in C")
    return 1e6 * taken_s / num_steps


class Stopwatch:
    """CPU seconds of this process by part, which other work on the machine disturbs little.

    Calls into engines, lanes, policies and sinks mark the parts. clock: leaves out the device of GPU engines.
    """

    def __init__(self, engines: str) -> None:
        self.engines = engines
        self.clock = HostClock()
        self.clear()
        self._mark = 0.0
        self._has_output = False

    def clear(self) -> None:
        self.seconds = dict.fromkeys(PARTS[self.engines], 0.0)
        self.clock.clear()

    def begin(self) -> None:
        self._has_output = False
        self._mark = self.clock.now_s()

    def pass_to(self, part: str | None) -> None:
        """Add the time since the last mark to `part`; None: drop it, for stand-ins of engines."""
        now = self.clock.now_s()
        if part is not None:
            self.seconds[part] += now - self._mark
        self._mark = now

    def sink(self, output: RequestOutput) -> bool:
        if not self._has_output:
            self.pass_to("commit")
            self._has_output = True
        return False

    def end(self) -> None:
        self.pass_to("output" if self._has_output else "commit")


class _WatchedEngine(DelegatingEngine):
    """An engine with marks. forward, draft: the parts that end when such a call begins, and when it returns."""

    def __init__(
        self,
        inner: Engine,
        watch: Stopwatch,
        forward: tuple[str | None, str | None] = ("batch", None),
        draft: tuple[str | None, str | None] = ("draft batch", None),
    ) -> None:
        super().__init__(inner)
        self._watch = watch
        self._forward = forward
        self._draft = draft

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        before, own = self._forward
        self._watch.pass_to(before)
        found = self._inner.forward(batch)
        self._watch.pass_to(own)
        return found

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        before, own = self._draft
        self._watch.pass_to(before)
        found = self._inner.draft(draft_batch)
        self._watch.pass_to(own)
        return found


class _WatchedSampler(GpuRejectionSampler):
    def __init__(self, engines: GpuEngines, max_draft_len: int, watch: Stopwatch) -> None:
        super().__init__(engines.target, engines.ops, max_draft_len, engines.draft_probs)
        self._watch = watch

    def sample(
        self,
        sampling: npt.NDArray[np.void],
        logits: Any,
        rows: VerificationRows,
        branches: BranchTokens | None = None,
    ) -> AcceptResult:
        self._watch.pass_to("commit")
        found = super().sample(sampling, logits, rows, branches)
        self._watch.pass_to("test")
        return found


class _WatchedDraftWorker(DraftWorker):
    def __init__(self, stage: DraftStage, enter_mode: Callable[[Mode], None], watch: Stopwatch) -> None:
        super().__init__(stage, enter_mode)
        self._watch = watch

    def draft(self, plan: SchedulerOutput) -> Drafting:
        self._watch.pass_to("schedule")
        drafting = super().draft(plan)
        self._watch.pass_to("draft batch")
        return drafting


class _WatchedPolicy:
    def __init__(self, inner: Policy, watch: Stopwatch) -> None:
        self.name = inner.name
        self._inner = inner
        self._watch = watch

    def plan(self, view: StepView) -> Decision:
        self._watch.pass_to("schedule")
        decision = self._inner.plan(view)
        self._watch.pass_to("policy")
        return decision

    def observe(self, stats: PlanStats) -> None:
        self._watch.pass_to("schedule")
        self._inner.observe(stats)
        self._watch.pass_to("policy")


def open_executor(
    system: str,
    num_requests: int,
    costs: CostTable,
    watch: Stopwatch,
    max_new_tokens: int,
    acceptance: float,
    max_draft_len: int,
    seed: int = 0,
) -> Executor:
    """Open an executor on watch.engines for prompts of PROMPT_LEN tokens; other arguments as in measure_step."""
    max_seq_len = PROMPT_LEN + max_new_tokens
    speculation, drafters = split_system(system)
    spec = EngineSpec(
        vocab_size=VOCAB_SIZE,
        max_seq_len=max_seq_len,
        num_layers=1,
        num_blocks=num_requests * ((max_seq_len + max_draft_len) // TOKENS_PER_BLOCK + 2),
        tokens_per_block=TOKENS_PER_BLOCK,
        max_num_tokens=num_requests * max(PROMPT_LEN, max_draft_len + 1),
        max_batch_size=num_requests,
        segments=(0, 1),
    )
    clock = ManualClock()
    policy = make_policy(speculation, max_draft_len, costs, num_requests, drafters)
    is_off = policy.name == "off"
    max_draft_len = 0 if is_off else max_draft_len
    has_draft = not is_off and DrafterName.MODEL in drafters
    of_target: Engine = NullEngine(spec, acceptance, seed)
    of_draft: Engine = NullEngine(spec)
    sampler = None
    resources = ExitStack()
    if watch.engines == GPU:
        opened = open_gpu_engines(
            spec, max_draft_len, watch.clock, resources, drafts=has_draft, acceptance=acceptance, seed=seed
        )
        of_target = _WatchedEngine(opened.target, watch, forward=(None, "target engine"))
        if opened.draft is not None:
            of_draft = _WatchedEngine(opened.draft, watch, draft=(None, "draft engine"))
        sampler = _WatchedSampler(opened, max_draft_len, watch)
    target, draft = PricedEngine(of_target, costs, clock), None
    if has_draft:
        draft = target.draft_engine = PricedEngine(of_draft, costs, clock, "draft")
    return assemble(
        _WatchedEngine(target, watch),
        None if draft is None else _WatchedEngine(draft, watch),
        _WatchedPolicy(policy, watch),
        ExecutorConfig(
            max_queue_size=num_requests,
            kv_cache_config=KvCacheConfig(enable_block_reuse=True),
            drafters=None if is_off else drafters,
        ),
        max_seq_len=max_seq_len,
        max_draft_len=max_draft_len,
        clock=clock,
        resources=resources,
        enter_mode=stay,
        sampler=sampler,
        make_worker=lambda stage, enter_mode: _WatchedDraftWorker(stage, enter_mode, watch),
    )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Collect the garbage of earlier measurements first, and none during this one."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
