"""Run a load on an executor to its end, and summarize the users' view in fixed memory."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from faser_trtllm.core.plan import RequestOutput
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.executor.executor import Executor
from lab.clock import ManualClock
from lab.planner.load.arrivals import Arrival
from lab.planner.load.histogram import Histogram

MINUTE_S = 60.0
REPORT_STEPS = 256  # steps between two calls of progress
Progress = Callable[[int], None]
"""A callback that gets the number of ended requests."""


@dataclass(frozen=True)
class Objectives:
    """Limits in ms for a request's first token and its mean time per further token; None: no limit.

    tolerance: relative error of times, for which goodput is a band.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tolerance: float = 0.0

    def are_met(self, ttft_ms: float, tpot_ms: float) -> bool:
        first, further = self.ttft_ms, self.tpot_ms
        return (first is None or ttft_ms <= first) and (further is None or tpot_ms <= further)

    def scaled(self, times: float) -> Objectives:
        return Objectives(
            None if self.ttft_ms is None else times * self.ttft_ms,
            None if self.tpot_ms is None else times * self.tpot_ms,
        )


@dataclass
class LoadReport:
    """Results of a load. busy_s: time with requests; steady_*: of a closed loop while all its streams were busy."""

    objectives: Objectives
    ttft_ms: Histogram = field(default_factory=Histogram)
    tpot_ms: Histogram = field(default_factory=Histogram)
    num_requests: int = 0
    num_met: int = 0
    num_surely_met: int = 0
    num_maybe_met: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0
    steady_s: float = 0.0
    steady_tokens: int = 0
    tokens_by_minute: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second while busy, in a closed loop while all streams were."""
        if self.steady_s:
            return self.steady_tokens / self.steady_s
        return self.num_tokens / self.busy_s if self.busy_s else 0.0

    @property
    def goodput(self) -> float:
        """The share of requests that met the objectives."""
        return self.num_met / max(1, self.num_requests)

    @property
    def goodput_band(self) -> tuple[float, float]:
        """The goodput with all times longer, and shorter, by the tolerance."""
        num_requests = max(1, self.num_requests)
        return self.num_surely_met / num_requests, self.num_maybe_met / num_requests


class _Sink:
    """The sink of one request's tokens."""

    __slots__ = ("_arrived_s", "_first_s", "_num_tokens", "_run")

    def __init__(self, run: _Run, arrived_s: float) -> None:
        self._run = run
        self._arrived_s = arrived_s
        self._first_s = -1.0
        self._num_tokens = 0

    def __call__(self, output: RequestOutput) -> bool:
        run = self._run
        count = len(output.new_token_ids)
        if count:
            self._num_tokens += count
            run.num_tokens += count
            if self._first_s < 0.0:
                self._first_s = run.clock.now_s()
        if output.finish_reason is not None:
            run.end(self._arrived_s, self._first_s, self._num_tokens)
        return False


class _Run:
    def __init__(self, executor: Executor, clock: ManualClock, objectives: Objectives, progress: Progress) -> None:
        self.clock = clock
        self.num_tokens = 0
        self.report = LoadReport(objectives)
        self._strict = objectives.scaled(1.0 / (1.0 + objectives.tolerance))
        self._lenient = objectives.scaled(1.0 + objectives.tolerance)
        self._executor = executor
        self._progress = progress
        self._number = 0

    @property
    def num_running(self) -> int:
        return self._number - self.report.num_requests

    def submit(self, arrival: Arrival, arrived_s: float) -> None:
        params = SamplingParams(max_tokens=arrival.output_len)
        self._executor.submit(str(self._number), _prompt(arrival.prompt_len), params, _Sink(self, arrived_s))
        self._number += 1

    def step(self) -> bool:
        started_s, before = self.clock.now_s(), self.num_tokens
        if not self._executor.step():
            return False
        report, now_s = self.report, self.clock.now_s()
        report.busy_s += now_s - started_s
        report.num_steps += 1
        minute = int(now_s / MINUTE_S)
        while len(report.tokens_by_minute) <= minute:
            report.tokens_by_minute.append(0)
        report.tokens_by_minute[minute] += self.num_tokens - before
        if report.num_steps % REPORT_STEPS == 0:
            self._progress(report.num_requests)
        return True

    def end(self, arrived_s: float, first_s: float, num_tokens: int) -> None:
        report, now_s = self.report, self.clock.now_s()
        ttft_ms = 1e3 * (first_s - arrived_s)
        tpot_ms = 1e3 * (now_s - first_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        report.ttft_ms.add(ttft_ms)
        if num_tokens > 1:
            report.tpot_ms.add(tpot_ms)
        report.num_requests += 1
        report.num_met += report.objectives.are_met(ttft_ms, tpot_ms)
        report.num_surely_met += self._strict.are_met(ttft_ms, tpot_ms)
        report.num_maybe_met += self._lenient.are_met(ttft_ms, tpot_ms)

    def finish(self) -> LoadReport:
        self.report.num_tokens = self.num_tokens
        self.report.end_s = self.clock.now_s()
        self._progress(self.report.num_requests)
        return self.report


@functools.cache
def _prompt(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


@contextmanager
def _no_collector() -> Iterator[None]:
    """Turn off Python's garbage collector, which visits all waiting requests repeatedly; steps create no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_collector()
def run_arrivals(
    executor: Executor,
    clock: ManualClock,
    arrivals: Iterable[Arrival],
    objectives: Objectives | None = None,
    progress: Progress = lambda done: None,
) -> LoadReport:
    """Run an open loop: requests arrive at their times, whatever is still running. Idle time is skipped."""
    run = _Run(executor, clock, objectives or Objectives(), progress)
    started_s = clock.now_s()
    waiting = iter(arrivals)
    coming = next(waiting, None)
    while coming is not None or run.num_running:
        while coming is not None and started_s + coming.at_s <= clock.now_s():
            run.submit(coming, started_s + coming.at_s)
            coming = next(waiting, None)
        if not run.step() and coming is not None:
            clock.advance(max(0.0, started_s + coming.at_s - clock.now_s()))
    return run.finish()


@_no_collector()
def run_closed_loop(
    executor: Executor,
    clock: ManualClock,
    requests: Iterator[tuple[int, int]],
    concurrency: int,
    num_requests: int,
    objectives: Objectives | None = None,
    progress: Progress = lambda done: None,
) -> LoadReport:
    """Run a closed loop, which keeps `concurrency` requests (prompt and output tokens) running.

    Rates cover the time from the end of the first `concurrency` requests, when streams are no longer in step, to the
    last submission.
    """
    run = _Run(executor, clock, objectives or Objectives(), progress)
    submitted = 0
    steady_from: tuple[float, int] | None = None
    while submitted < num_requests or run.num_running:
        while submitted < num_requests and run.num_running < concurrency:
            prompt_len, output_len = next(requests)
            run.submit(Arrival(0.0, prompt_len, output_len), clock.now_s())
            submitted += 1
            if submitted == num_requests and steady_from is not None:
                run.report.steady_s = clock.now_s() - steady_from[0]
                run.report.steady_tokens = run.num_tokens - steady_from[1]
        if steady_from is None and run.report.num_requests >= concurrency:
            steady_from = clock.now_s(), run.num_tokens
        run.step()
    return run.finish()
