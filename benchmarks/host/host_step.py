"""One measurement: an executor with engines that cost nothing, and where the time of its steps goes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from benchmarks.host.options import split_system
from faser_trtllm import native
from faser_trtllm.config import DrafterName, ExecutorConfig, KvCacheConfig
from faser_trtllm.core.batch import RaggedBatch
from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.decision import Decision, Mode, PlanStats, StepView
from faser_trtllm.core.plan import RequestOutput, SchedulerOutput
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import DraftBatch, EngineSpec
from faser_trtllm.engine.opening import stay
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import assemble
from faser_trtllm.executor.lanes import Drafting, DraftLane, DraftStage
from faser_trtllm.policy.base import Policy
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.testing.delegating_engine import DelegatingEngine
from faser_trtllm.testing.null_engines import VOCAB_SIZE, NullEngine
from faser_trtllm.testing.simulation.priced_engine import PricedEngine

PARTS = ("schedule", "policy", "draft batch", "batch", "commit", "output")
"""schedule: rows and blocks. policy: its plans. draft batch, batch: what the two passes get. commit: from the pass to
the first output: the test of the drafts, tokens, blocks, what ends. output: sinks, then statistics."""

PROMPT_LEN, TOKENS_PER_BLOCK = 32, 32
WARM_UP_STEPS = 40  # price has learnt, and caches are warm


def measure_step(
    system: str,
    num_requests: int,
    costs: CostTable,
    *,
    num_steps: int,
    acceptance: float,
    max_draft_len: int,
    seed: int = 0,
) -> dict[str, float]:
    """Microseconds of a step by its parts, the mean over num_steps steps in which num_requests requests decode.

    system: as benchmarks.host.options.split_system takes it.

    The clock that the policy sees passes as the cost table says, so that it decides as it would on that machine.
    """
    watch = _Stopwatch()
    max_new_tokens = (WARM_UP_STEPS + num_steps + 2) * (max_draft_len + 1)
    executor = _open(system, num_requests, costs, watch, max_new_tokens, acceptance, max_draft_len, seed)
    with executor:
        params = SamplingParams(max_tokens=max_new_tokens, temperature=0.0)
        for number in range(num_requests):
            executor.submit(str(number), [0] * PROMPT_LEN, params, watch.sink)
        for _ in range(WARM_UP_STEPS):
            executor.step()
        watch.clear()
        with _without_collector():
            for _ in range(num_steps):
                watch.begin()
                executor.step()
                watch.end()
        assert executor.stats()["num_scheduled"] == num_requests, "a request ended while it was measured"
    return {part: 1e6 * watch.seconds[part] / num_steps for part in PARTS}


def measure_reference(num_requests: int, num_drafts: int, num_steps: int) -> float:
    """Microseconds of a step of the loop in C; its allocations are spread over the steps."""
    begun_s = time.process_time()
    found = native.library().faser_host_loop(num_requests, num_drafts, num_steps, 1)
    taken_s = time.process_time() - begun_s
    native.check(min(found, 0), "the loop in C")
    return 1e6 * taken_s / num_steps


class _Stopwatch:
    """Seconds that this process had a core, by part, so that what else runs on the machine counts little.

    Marks are what calls into engines, lanes, policies and sinks tell of the executor.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._mark = 0.0
        self._has_output = False

    def clear(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def begin(self) -> None:
        self._has_output = False
        self._mark = time.process_time()

    def pass_to(self, part: str | None) -> None:
        """What passed since the last mark was `part`; None: an engine."""
        now = time.process_time()
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
    def __init__(self, inner: PricedEngine, watch: _Stopwatch) -> None:
        super().__init__(inner)
        self._watch = watch

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        self._watch.pass_to("batch")
        found = self._inner.forward(batch)
        self._watch.pass_to(None)
        return found

    def draft(self, draft_batch: DraftBatch) -> npt.NDArray[np.int32]:
        self._watch.pass_to("draft batch")
        found = self._inner.draft(draft_batch)
        self._watch.pass_to(None)
        return found


class _WatchedLane(DraftLane):
    def __init__(self, stage: DraftStage, enter_mode: Callable[[Mode], None], watch: _Stopwatch) -> None:
        super().__init__(stage, enter_mode)
        self._watch = watch

    def draft(self, plan: SchedulerOutput) -> Drafting:
        self._watch.pass_to("schedule")
        drafting = super().draft(plan)
        self._watch.pass_to("draft batch")
        return drafting


class _WatchedPolicy:
    def __init__(self, inner: Policy, watch: _Stopwatch) -> None:
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


def _open(
    system: str,
    num_requests: int,
    costs: CostTable,
    watch: _Stopwatch,
    max_new_tokens: int,
    acceptance: float,
    max_draft_len: int,
    seed: int,
) -> Executor:
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
    target = PricedEngine(NullEngine(spec, acceptance, seed), costs, clock)
    policy = make_policy(speculation, max_draft_len, costs, num_requests, drafters)
    draft = None
    is_off = policy.name == "off"
    if not is_off and DrafterName.MODEL in drafters:
        draft = target.draft_engine = PricedEngine(NullEngine(spec), costs, clock, "draft")
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
        max_draft_len=0 if is_off else max_draft_len,
        clock=clock,
        enter_mode=stay,
        make_lane=lambda stage, enter_mode: _WatchedLane(stage, enter_mode, watch),
    )


@contextmanager
def _without_collector() -> Iterator[None]:
    """The garbage of earlier measurements is nobody's."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
