"""Simulate the steady rate of one policy at one load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.policies.varying_clock import ChangingClock
from benchmarks.replay.engines import VOCAB_SIZE, ReplayedDraft, ReplayedTarget, prompt_of
from benchmarks.replay.recording import NUM_OUTPUT, PROMPT_LEN, TEMPERATURE, Recording
from faser_trtllm.config import ExecutorConfig, KvCacheConfig
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.plan import RequestOutput, SchedulerOutput
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import Engine, EngineSpec
from faser_trtllm.engine.opening import stay
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import assemble
from faser_trtllm.policy.registry import make_policy
from lab.clock import ManualClock
from lab.costmodel.measured import MeasuredGpu
from lab.simulation.draft_worker import SimulatedDraftWorker
from lab.simulation.priced_engine import PassTimes, PricedEngine
from lab.simulation.routed_engine import RoutedEngine
from lab.simulation.router import SyntheticRouter

TOKENS_PER_BLOCK = 32
MAX_NUM_TOKENS = 2048  # `faser build`'s default
OUTPUTS = (32, NUM_OUTPUT)  # least and most tokens of a request


@dataclass(frozen=True)
class Job:
    text: int
    num_output: int
    seed: int | None


@dataclass(frozen=True)
class Machine:
    """A machine. times: of passes on the clock. host_ms: time of a step outside its passes.

    believed: the policy's cost table. router: chooses the experts of a mixture's rows.
    """

    times: PassTimes
    host_ms: Callable[[SchedulerOutput], float]
    believed: CostTable
    router: SyntheticRouter | None = None

    @staticmethod
    def of_table(table: CostTable) -> Machine:
        """Return a machine that has exactly the times of its cost table."""
        return Machine(table, lambda plan: table.overhead_ms, table)

    @staticmethod
    def of_gpu(gpu: MeasuredGpu, believed: CostTable) -> Machine:
        return Machine(gpu, lambda plan: _host_ms(gpu, plan), believed)


def _host_ms(gpu: MeasuredGpu, plan: SchedulerOutput) -> float:
    num_decoding = plan.scheduled.num_decoding
    return gpu.host_ms(num_decoding, len(plan.scheduled) - num_decoding, plan.runs_draft_model)


def draw_jobs(recording: Recording, num_jobs: int, seed: int, outputs: tuple[int, int] = OUTPUTS) -> list[Job]:
    """Draw random texts, half of them greedy, with uniform lengths."""
    rng = np.random.default_rng(seed)
    greedy, seeded = np.flatnonzero(~recording.is_seeded), np.flatnonzero(recording.is_seeded)
    lengths = rng.integers(outputs[0], outputs[1] + 1, num_jobs).tolist()
    return [
        Job(int(rng.choice(seeded if i % 2 else greedy)), length, i if i % 2 else None)
        for i, length in enumerate(lengths)
    ]


def open_replay(recording: Recording, machine: Machine, spelling: str, load: int, clock: ManualClock) -> Executor:
    """Open an executor on replayed engines whose passes take the machine's time on the clock."""
    max_seq_len = PROMPT_LEN + NUM_OUTPUT + recording.max_draft_len + 1
    num_blocks = load * -(-max_seq_len // TOKENS_PER_BLOCK) + load
    spec = EngineSpec(VOCAB_SIZE, max_seq_len, 1, num_blocks, TOKENS_PER_BLOCK, MAX_NUM_TOKENS, load, (0, 1))
    policy = make_policy(spelling, recording.max_draft_len, machine.believed, load)
    target: Engine = ReplayedTarget(spec)
    if machine.router is not None:
        target = RoutedEngine(target, machine.router)
    engines: dict[str, PricedEngine] = {"target": PricedEngine(target, machine.times, clock)}
    if policy.name != "off":
        engines["draft"] = PricedEngine(ReplayedDraft(spec, recording), machine.times, clock)
        engines["target"].draft_engine = engines["draft"]
    return assemble(
        engines["target"],
        engines.get("draft"),
        policy,
        ExecutorConfig(kv_cache_config=KvCacheConfig(enable_block_reuse=False)),
        max_seq_len=max_seq_len,
        max_draft_len=recording.max_draft_len,
        clock=clock,
        enter_mode=stay,
        make_worker=lambda stage, _: SimulatedDraftWorker(stage, engines, machine.times, clock, machine.host_ms),
    )


def run_closed_loop(
    executor: Executor,
    now_s: Callable[[], float],
    jobs: Sequence[Job],
    load: int,
    num_warm_up: int,
    window_s: tuple[float, float] | None = None,
) -> float:
    """Keep `load` jobs running and return output tokens per second.

    The rate covers the time from the end of num_warm_up jobs (0: from the first step) until fewer are left, or
    window_s: start and end on a clock that begins at 0.
    """
    num_tokens = num_running = num_ended = 0

    def sink(output: RequestOutput) -> bool:
        nonlocal num_tokens, num_running, num_ended
        num_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            num_running -= 1
            num_ended += 1
        return False

    begun = None if num_warm_up or window_s else (now_s(), 0)
    waiting = iter(enumerate(jobs))
    while True:
        while num_running < load:
            number, job = next(waiting, (0, None))
            if job is None:
                assert begun is not None, "the warm-up took all jobs"
                return (num_tokens - begun[1]) / (now_s() - begun[0])
            params = SamplingParams(max_tokens=job.num_output)
            if job.seed is not None:
                params = SamplingParams(max_tokens=job.num_output, temperature=TEMPERATURE, seed=job.seed)
            executor.submit(str(number), prompt_of(job.text, PROMPT_LEN), params, sink)
            num_running += 1
        executor.step()
        is_warm = num_ended >= num_warm_up if window_s is None else now_s() >= window_s[0]
        if begun is None and is_warm:
            begun = now_s(), num_tokens
        if begun is not None and window_s is not None and now_s() >= window_s[1]:
            return (num_tokens - begun[1]) / (now_s() - begun[0])


def simulate(
    recording: Recording,
    machine: Machine,
    spelling: str,
    load: int,
    seed: int,
    slowdown: float = 1.0,
    outputs: tuple[int, int] = OUTPUTS,
) -> float:
    """Return output tokens per second of a policy; slowdown: as in ChangingClock, left out of the rate."""
    num_warm_up, num_measured = 2 * load + 16, max(320, 6 * load)
    jobs = draw_jobs(recording, num_warm_up + num_measured, seed, outputs)
    clock = ChangingClock(slowdown, seed) if slowdown > 1.0 else ManualClock()
    now_s = clock.nominal_s if isinstance(clock, ChangingClock) else clock.now_s
    with open_replay(recording, machine, spelling, load, clock) as executor:
        return run_closed_loop(executor, now_s, jobs, load, num_warm_up)
