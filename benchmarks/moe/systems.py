"""A policy with its own executor, which works in turns on endless requests.

Systems take turns because a machine's speed changes within seconds by more than policies differ. Acceptance depends on
a request's prompt and position only, so it is the same for all systems.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.moe.model import VOCAB_SIZE
from benchmarks.moe.options import MAX_DRAFT_LEN, MoeBenchOptions
from benchmarks.policies.stopwatch import Stopwatch
from benchmarks.policies.systems import SETTLE_S
from faser_trtllm.config import DrafterName, ExecutorConfig, KvCacheConfig
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.plan import RequestOutput, StepRecord
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.executor.stats import StepWatcher
from faser_trtllm.policy.registry import make_policy


class PassCounter(StepWatcher):
    """A watcher of passes.

    counts: decode passes and the sum of their distinct experts per layer, by requests and rows.
    num_expected: expected tokens of all passes, so that random acceptance favors no system.
    """

    def __init__(self, acceptance: float) -> None:
        self.counts: dict[tuple[int, int], tuple[int, float]] = {}
        self.num_expected = 0.0
        self._expected = np.cumsum(acceptance ** np.arange(1 + MAX_DRAFT_LEN))  # expected tokens by drafts with rows

    def step(self, record: StepRecord) -> None:
        result, num_decoding = record.result, record.plan.scheduled.num_decoding
        self.num_expected += float(self._expected[result.num_verified[:num_decoding]].sum())
        self.num_expected += int(result.num_tokens[num_decoding:].sum())
        if record.num_rows and not record.num_context_rows:
            key = (record.plan.scheduled.num_decoding, record.num_rows)
            number, total = self.counts.get(key, (0, 0.0))
            self.counts[key] = (number + 1, total + result.num_experts)


class _Stream:
    """The sink of a client that sends requests without end. requests: number of ended requests."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_requests = 0
        self.is_running = False

    def __call__(self, output: RequestOutput) -> bool:
        self.num_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            self.num_requests += 1
            self.is_running = False
        return False


class System:
    """A system: begin() opens streams, turn() works on them, end() cancels running requests."""

    def __init__(
        self, name: str, options: MoeBenchOptions, executor: Executor, clock: Stopwatch, acceptance: float
    ) -> None:
        """Watch the executor's passes since begin()."""
        self.name = name
        self.passes = PassCounter(acceptance)
        executor.watch(self.passes)
        self._options = options
        self._executor = executor
        self._clock = clock
        self._streams: list[_Stream] = []
        self._ids = itertools.count()
        self._cell = 0
        self._open: dict[int, str] = {}

    def begin(self, cell: int, batch_size: int) -> None:
        """Open the streams of a cell, whose requests are the same for all systems."""
        self._cell = cell
        self._streams = [_Stream() for _ in range(batch_size)]
        self.passes.counts.clear()
        self._refill()

    def turn(self, least_s: float) -> tuple[float, float]:
        """Run whole steps for at least least_s; return expected tokens and seconds."""
        time.sleep(SETTLE_S)  # until the thread pool of the last system stops spinning
        before, start_s = self.passes.num_expected, self._clock.now_s()
        self._clock.start()
        while self._clock.now_s() - start_s < least_s:
            self._executor.step()
            self._refill()
        self._clock.stop()
        return self.passes.num_expected - before, self._clock.now_s() - start_s

    def end(self) -> None:
        for stream, request_id in self._open.items():
            if self._streams[stream].is_running:
                self._executor.cancel(request_id)
        self._clock.start()
        while self._executor.step():
            pass
        self._clock.stop()

    @property
    def num_tokens(self) -> int:
        """Tokens that the clients of this cell got."""
        return sum(stream.num_tokens for stream in self._streams)

    def _refill(self) -> None:
        options = self._options
        for number, stream in enumerate(self._streams):
            if stream.is_running:
                continue
            rng = np.random.default_rng([options.seed, self._cell, number, stream.num_requests])
            prompt = rng.integers(1, VOCAB_SIZE, options.prompt_len).tolist()
            # Seeded sampling, since a greedy random model repeats its tokens.
            seed = int(rng.integers(1 << 32))
            length = int(rng.integers(options.max_tokens // 2, options.max_tokens + 1))  # so that not all end at once
            params = SamplingParams(max_tokens=length, temperature=1.0, seed=seed, end_ids=())
            self._open[number] = request_id = f"{self.name}-{next(self._ids)}"
            self._executor.submit(request_id, prompt, params, stream)
            stream.is_running = True


def open_system(
    name: str,
    spelling: str,
    engine_dir: Path,
    acceptance: float,
    options: MoeBenchOptions,
    stack: ExitStack,
    table: CostTable | None = None,
) -> System:
    """Open an executor; stack closes it. table: replaces the engine directory's."""
    clock = Stopwatch()
    max_batch_size = options.max_batch_size
    config = ExecutorConfig(
        speculation=spelling,
        cores=options.cores,
        num_threads=options.num_threads,
        synthetic_acceptance=(acceptance,) * MAX_DRAFT_LEN,
        kv_cache_config=KvCacheConfig(enable_block_reuse=False, max_tokens=max_batch_size * options.max_seq_len),
    )
    executor = stack.enter_context(
        open_executor(
            engine_dir,
            config,
            clock,
            lambda policy: (
                policy
                if table is None
                else make_policy(spelling, MAX_DRAFT_LEN, table, max_batch_size, (DrafterName.MODEL,))
            ),
        )
    )
    return System(name, options, executor, clock, acceptance)
