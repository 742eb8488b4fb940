"""The systems of a form: one executor per policy on the same engine directory, which work in turns.

Turns last SLICE_S, because a machine's speed changes within seconds by more than policies differ. Each system has its
own clock, which runs in its turns only, and not while its witness counts.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.policies.drive import DriveResult, drive_steps
from benchmarks.policies.options import SLICE_S, PolicyBenchOptions
from benchmarks.policies.report import Calibration, Round, Timeline, percentile
from benchmarks.policies.simulation import open_simulation
from benchmarks.policies.stopwatch import Stopwatch
from benchmarks.policies.varying_clock import ChangingClock
from benchmarks.policies.watch import Counts, StepWitness, TimelinePoint
from benchmarks.policies.workload import Workload
from faser_trtllm.config import ExecutorConfig, KvCacheConfig
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.executor.executor import Executor
from faser_trtllm.executor.factory import open_executor
from faser_trtllm.policy.base import Policy
from lab.clock import ManualClock

SETTLE_S = 0.001  # until the thread pool of the last system stops spinning
TIMELINE_BINS = 120


class System:
    """An open executor, its policy and a witness. The policy keeps its learnt state from run to run."""

    def __init__(
        self, name: str, executor: Executor, policy: Policy, witness: StepWitness, clock: Stopwatch | ManualClock
    ) -> None:
        """Join the parts; witness watches the executor."""
        self.name = name
        self._clock = clock
        # Rates leave out simulated changes of speed, which differ between systems and which no policy controls.
        self._rate_clock = clock.nominal_s if isinstance(clock, ChangingClock) else clock.now_s
        self._executor = executor
        self._policy = policy
        self._witness = witness
        self._run: Generator[None, None, DriveResult] | None = None

    def run(self, workload: Workload) -> tuple[Round, DriveResult]:
        """Run a workload to its end without turns of other systems."""
        self.begin(workload)
        while (ended := self.turn()) is None:
            pass
        return ended

    def begin(self, workload: Workload) -> None:
        """Prepare a workload, which turn() runs."""
        self._witness.start()
        self._run = drive_steps(self._executor, workload, self._rate_clock)

    def turn(self) -> tuple[Round, DriveResult] | None:
        """Work for SLICE_S of its clock, and return the results at the end of the workload, else None."""
        assert self._run is not None, "begin() comes first"
        if isinstance(self._clock, Stopwatch):
            time.sleep(SETTLE_S)
            self._clock.start()
        try:
            end_s = self._clock.now_s() + SLICE_S
            while self._clock.now_s() < end_s:
                next(self._run)
        except StopIteration as end:
            self._run = None
            return summarize_round(end.value, self._witness.counts), end.value
        finally:
            if isinstance(self._clock, Stopwatch):
                self._clock.stop()
        return None

    def timeline(self, expand: int) -> Timeline | None:
        """Return the timeline of the last run; None if no step decoded."""
        return bin_timeline(expand, self.name, self._witness.timeline) if self._witness.timeline else None

    def calibration(self, expand: int) -> Calibration | None:
        """Return the calibration of the policy's survival estimator, if it has one."""
        estimator = getattr(self._policy, "estimator", None)
        if estimator is None:
            return None
        count, predicted, passed = estimator.tested.bins
        return Calibration.of(expand, self.name, count, predicted, passed) if count.sum() else None


def open_system(
    name: str, spelling: str, engine_dir: Path, table: CostTable, options: PolicyBenchOptions, stack: ExitStack
) -> System:
    """Open an executor; stack closes it."""
    policies: list[Policy] = []
    clock: Stopwatch | ManualClock = Stopwatch()
    if options.simulated:
        clock = ChangingClock(options.slowdown, options.seed) if options.slowdown > 1.0 else ManualClock()

    def watch(policy: Policy) -> Policy:
        policies.append(policy)
        return policy

    longest = options.prompt_len + options.max_tokens + 16
    config = ExecutorConfig(
        speculation=spelling,
        cores=options.cores,
        num_threads=options.num_threads,
        # Prompts repeat every round, and reuse would skip their prefill from the second round on.
        kv_cache_config=KvCacheConfig(
            enable_block_reuse=False, max_tokens=options.max_batch_size * (-(-longest // 64) * 64)
        ),
    )
    if isinstance(clock, ManualClock):
        executor = stack.enter_context(open_simulation(engine_dir, config, table, clock, watch))
    else:
        executor = stack.enter_context(open_executor(engine_dir, config, clock, watch))
    witness = StepWitness(table, clock if isinstance(clock, Stopwatch) else None)
    executor.watch(witness)
    return System(name, executor, policies[0], witness, clock)


def summarize_round(result: DriveResult, counts: Counts) -> Round:
    ttft = [1e3 * t.ttft_s for t in result.timings]
    per_token = [1e3 * t.per_token_s for t in result.timings if t.per_token_s is not None]
    decode_rows = counts.num_rows - counts.num_context_rows
    draft_rows = decode_rows - counts.num_requests + counts.num_pruned
    steps = max(1, counts.num_steps)
    return Round(
        tokens_per_s=result.tokens_per_s,
        ttft_p50_ms=percentile(ttft, 0.5),
        ttft_p99_ms=percentile(ttft, 0.99),
        per_token_p50_ms=percentile(per_token, 0.5),
        per_token_p99_ms=percentile(per_token, 0.99),
        acceptance=counts.num_accepted / counts.num_tested if counts.num_tested else None,
        rows_per_token=decode_rows / max(1, counts.num_tokens),
        share_pruned=counts.num_pruned / draft_rows if draft_rows else 0.0,
        oracle=counts.oracle_ms / counts.step_ms if counts.step_ms else 1.0,
        draft_len=sum(k * n for k, n in counts.lengths.items()) / max(1, counts.num_requests),
        draft_share=counts.draft_ms / counts.step_ms if counts.step_ms else 0.0,
        modes={mode: n / steps for mode, n in counts.modes.items()},
    )


def bin_timeline(expand: int, system: str, points: list[TimelinePoint]) -> Timeline:
    """Return bins of equal width between the first and the last step, without empty ones."""
    first, last = points[0].now_s, points[-1].now_s
    width = max(last - first, 1e-9) / TIMELINE_BINS
    bins: dict[int, list[TimelinePoint]] = {}
    for point in points:
        bins.setdefault(min(TIMELINE_BINS - 1, int((point.now_s - first) / width)), []).append(point)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return Timeline(
        expand,
        system,
        tuple((number + 0.5) * width for number in bins),
        tuple(mean([p.num_requests for p in group]) for group in bins.values()),
        tuple(mean([p.draft_len for p in group]) for group in bins.values()),
        tuple(sum(p.num_tokens for p in group) / width for group in bins.values()),
    )
