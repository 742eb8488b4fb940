"""Runs measured on an H100 (2026-11-26), and the same runs simulated with the engine of that day.

The measured texts were not kept, so a simulated rate is corrected for the acceptance of the recorded texts: in section
timeline to the measured tokens per request and step, in section policies to the measured rows per token.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.replay.first_seen import FirstSeenGpu
from benchmarks.replay.recording import Recording
from benchmarks.replay.simulate import Job, Machine, open_replay, run_closed_loop
from faser_trtllm.core.cost_table import CostTable
from faser_trtllm.core.plan import StepRecord
from faser_trtllm.executor.stats import StepWatcher
from lab.clock import ManualClock
from lab.costmodel.measured import MeasuredGpu

CLAIM = 0.10  # largest error of a claimed figure
NEARLY_ALL = 0.9  # share of the load that decodes in a steady step
TIMELINE, POLICIES = "timeline", "policies"


@dataclass(frozen=True)
class Run:
    """One cell of a section of `faser bench gpu`. tokens_per_s is of the whole run, steady_* of steps that only decode.

    rows_per_token: of the target's passes without prompts. not_claimed: reasons by figure.
    """

    section: str
    load: int
    speculation: str
    tokens_per_s: float
    not_claimed: Mapping[str, str]
    steady_median_ms: float = 0.0
    steady_mean_ms: float = 0.0
    steady_tokens_per_s: float = 0.0
    rows_per_token: float = 0.0

    @property
    def tokens_per_request(self) -> float:
        """Tokens per request and steady step."""
        return self.steady_tokens_per_s * 1e-3 * self.steady_mean_ms / self.load


@dataclass(frozen=True)
class Figure:
    """A figure. corrected: the simulated one with the measured acceptance, whose error counts."""

    run: Run
    name: str
    measured: float
    simulated: float
    corrected: float

    @property
    def error(self) -> float:
        return self.corrected / self.measured - 1.0

    @property
    def is_claimed(self) -> bool:
        return self.name not in self.run.not_claimed

    @property
    def is_broken(self) -> bool:
        return self.is_claimed and abs(self.error) > CLAIM


def measured_runs() -> list[Run]:
    data = json.loads(Path(__file__).with_suffix(".json").read_text())
    return [Run(**run) for run in data["runs"]]


def compare(recording: Recording, believed: CostTable) -> Iterator[Figure]:
    """Yield all figures of all runs; a steady median has only passes whose row counts occurred before.

    believed: any table, since no length of these runs depends on it.
    """
    for run in measured_runs():
        # The measured engines served several runs, but their lost time fits row counts that are new in each run.
        found = simulate_run(recording, FirstSeenGpu(), believed, run)
        if run.section == POLICIES:
            factor = found.rows_per_token / run.rows_per_token
        else:
            factor = run.tokens_per_request / found.tokens_per_request
            seen = simulate_run(recording, MeasuredGpu(is_padded=False), believed, run)
            yield Figure(run, "steady_median_ms", run.steady_median_ms, seen.steady_median_ms, seen.steady_median_ms)
            rate = found.steady_tokens_per_s
            yield Figure(run, "steady_tokens_per_s", run.steady_tokens_per_s, rate, rate * factor)
        yield Figure(run, "tokens_per_s", run.tokens_per_s, found.tokens_per_s, found.tokens_per_s * factor)


def simulate_run(recording: Recording, gpu: MeasuredGpu, believed: CostTable, run: Run) -> Run:
    clock, steps = ManualClock(), _Steps()
    load = run.load
    with open_replay(recording, Machine.of_gpu(gpu, believed), run.speculation, load, clock) as executor:
        if run.section == TIMELINE:
            run_closed_loop(executor, clock.now_s, draw_jobs(recording, load, (12, 24), seed=1), load, 0)
            while executor.step():
                pass
            jobs = draw_jobs(recording, max(8, load if load == 256 else load * 3 // 2), (96, 192), seed=load)
        else:  # the measurement had time for the warm-up round only
            jobs = draw_jobs(recording, max(4, 2 * load), (32, 96), seed=load)
        executor.watch(steps)
        tokens_per_s = run_closed_loop(executor, clock.now_s, jobs, load, 0)
        while executor.step():
            pass
    return steps.summary(run, tokens_per_s)


def draw_jobs(recording: Recording, num_jobs: int, outputs: tuple[int, int], seed: int) -> list[Job]:
    """Draw greedy and seeded texts in turn, as the suite does, with uniform lengths."""
    rng = np.random.default_rng(seed)
    texts = np.flatnonzero(~recording.is_seeded), np.flatnonzero(recording.is_seeded)
    lengths = rng.integers(outputs[0], outputs[1] + 1, num_jobs).tolist()
    return [
        Job(int(texts[i % 2][i % len(texts[i % 2])]), length, i if i % 2 else None) for i, length in enumerate(lengths)
    ]


@dataclass(frozen=True)
class _Step:
    num_requests: int  # decoding requests
    only_decodes: bool
    num_tokens: int
    num_rows: int
    ms: float


class _Steps(StepWatcher):
    """A watcher of an executor's steps."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def step(self, record: StepRecord) -> None:
        rows = record.plan.scheduled
        n = rows.num_decoding
        if not n:
            return
        # Steps in which prompts ended count as steps that only decode, as in the measured report.
        only_decodes = all(request.is_decoding for request in rows.requests[: rows.num_running])
        ms = 1e3 * (record.updated_s - record.begun_s)
        self._steps.append(_Step(n, only_decodes, n + record.num_accepted, n + record.num_verified, ms))

    def summary(self, run: Run, tokens_per_s: float) -> Run:
        steady = [s for s in self._steps if s.only_decodes and s.num_requests >= NEARLY_ALL * run.load]
        ms = [s.ms for s in steady]
        rows_per_token = sum(s.num_rows for s in self._steps) / sum(s.num_tokens for s in self._steps)
        found = replace(run, tokens_per_s=tokens_per_s, rows_per_token=rows_per_token)
        if not ms:  # with 512 short requests, 256 at a time, some always begin
            return found
        rate = 1e3 * sum(s.num_tokens for s in steady) / sum(ms)
        return replace(
            found,
            steady_median_ms=statistics.median(ms),
            steady_mean_ms=statistics.fmean(ms),
            steady_tokens_per_s=rate,
        )
