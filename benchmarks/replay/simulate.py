"""One policy at one load: the rate in steady state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.engines import VOCAB_SIZE, ReplayedDraft, ReplayedTarget, prompt_of
from benchmarks.replay.recording import NUM_OUTPUT, PROMPT_LEN, TEMPERATURE, Recording
from faser_trtllm.config import ExecutorConfig, KvCacheConfig
from faser_trtllm.core.clock import ManualClock
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.engine.base import EngineSpec
from faser_trtllm.engine.opening import stay
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import assemble
from faser_trtllm.policy.registry import make_policy
from faser_trtllm.testing.simulation.lanes import SimulatedLane
from faser_trtllm.testing.simulation.priced_engine import PricedEngine
from faser_trtllm.testing.simulation.varying_clock import ChangingClock

MIN_OUTPUT = 32
TOKENS_PER_BLOCK = 32
MAX_NUM_TOKENS = 2048  # `faser build`'s default


@dataclass(frozen=True)
class Job:
    text: int
    num_output: int
    seed: int | None


def draw_jobs(recording: Recording, num_jobs: int, seed: int) -> list[Job]:
    """Texts at random, half of them greedy; lengths uniform from MIN_OUTPUT to what was recorded."""
    rng = np.random.default_rng(seed)
    greedy, seeded = np.flatnonzero(~recording.is_seeded), np.flatnonzero(recording.is_seeded)
    lengths = rng.integers(MIN_OUTPUT, NUM_OUTPUT + 1, num_jobs).tolist()
    return [
        Job(int(rng.choice(seeded if i % 2 else greedy)), length, i if i % 2 else None)
        for i, length in enumerate(lengths)
    ]


def open_replay(recording: Recording, table: CostTable, spelling: str, load: int, clock: ManualClock) -> Executor:
    """An executor over replayed engines whose passes take the table's time on the clock."""
    max_seq_len = PROMPT_LEN + NUM_OUTPUT + recording.max_draft_len + 1
    num_blocks = load * -(-max_seq_len // TOKENS_PER_BLOCK) + load
    spec = EngineSpec(VOCAB_SIZE, max_seq_len, 1, num_blocks, TOKENS_PER_BLOCK, MAX_NUM_TOKENS, load, (0, 1))
    policy = make_policy(spelling, recording.max_draft_len, table, load)
    engines: dict[str, PricedEngine] = {"target": PricedEngine(ReplayedTarget(spec), table, clock)}
    if policy.name != "off":
        engines["draft"] = PricedEngine(ReplayedDraft(spec, recording), table, clock)
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
        make_lane=lambda stage, enter_mode: SimulatedLane(stage, engines, table, clock),
    )


def run_closed_loop(
    executor: Executor, now_s: Callable[[], float], jobs: Sequence[Job], load: int, num_warm_up: int
) -> float:
    """Keeps `load` jobs in flight -> output tokens per second, from the end of the num_warm_up-th job to the moment
    when fewer are left."""
    num_tokens = num_running = num_ended = 0

    def sink(output: RequestOutput) -> bool:
        nonlocal num_tokens, num_running, num_ended
        num_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            num_running -= 1
            num_ended += 1
        return False

    begun: tuple[float, int] | None = None
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
        if begun is None and num_ended >= num_warm_up:
            begun = now_s(), num_tokens


def simulate(recording: Recording, table: CostTable, spelling: str, load: int, seed: int, slowdown: float) -> float:
    """Output tokens per second of a policy; slowdown: as ChangingClock has it, and left out of the rate."""
    num_warm_up, num_measured = 2 * load + 16, max(320, 6 * load)
    jobs = draw_jobs(recording, num_warm_up + num_measured, seed)
    clock = ChangingClock(slowdown, seed) if slowdown > 1.0 else ManualClock()
    now_s = clock.nominal_s if isinstance(clock, ChangingClock) else clock.now_s
    with open_replay(recording, table, spelling, load, clock) as executor:
        return run_closed_loop(executor, now_s, jobs, load, num_warm_up)
