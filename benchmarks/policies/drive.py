"""Run a workload on an executor, step by step in the calling thread, and time every request."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.policies.workload import Job, Workload
from faser_trtllm.core.plan import RequestOutput


class Runs(Protocol):
    """The part of an Executor that a bench needs."""

    def submit(self, request_id: str, prompt_token_ids: Sequence[int], params: Any, sink: Any) -> None: ...

    def step(self) -> bool: ...


@dataclass(frozen=True)
class Timing:
    """Times of one request: from arrival to its first token, and the mean per later token."""

    ttft_s: float
    per_token_s: float | None  # None for a single token


@dataclass(frozen=True)
class DriveResult:
    """Results of a workload. tokens_per_s: over the time with all streams busy, in an open loop with any request.

    token_ids: by job. skipped_s: idle time that the clock skipped.
    """

    tokens_per_s: float
    busy_s: float
    skipped_s: float
    timings: tuple[Timing, ...]
    token_ids: tuple[tuple[int, ...], ...]


class _Record:
    """The sink of one job."""

    def __init__(self, arrival_s: float, now_s: Callable[[], float]) -> None:
        self.arrival_s = arrival_s
        self.token_ids: list[int] = []
        self.first_s = self.last_s = 0.0
        self.finished = False
        self._now_s = now_s

    def __call__(self, output: RequestOutput) -> bool:
        if output.new_token_ids:
            self.last_s = self._now_s()
            if not self.token_ids:
                self.first_s = self.last_s
            self.token_ids += output.new_token_ids
        self.finished = output.finish_reason is not None
        return False

    def timing(self) -> Timing:
        later = len(self.token_ids) - 1
        return Timing(self.first_s - self.arrival_s, (self.last_s - self.first_s) / later if later > 0 else None)


def drive(executor: Runs, workload: Workload, clock: Callable[[], float] = time.perf_counter) -> DriveResult:
    run = drive_steps(executor, workload, clock)
    while True:
        try:
            next(run)
        except StopIteration as end:
            result: DriveResult = end.value
            return result


def drive_steps(executor: Runs, workload: Workload, clock: Callable[[], float]) -> Generator[None, None, DriveResult]:
    """Run drive() as a generator that yields after each step; the clock may stop meanwhile."""
    return _closed(executor, workload, clock) if workload.concurrency is not None else _open(executor, workload, clock)


def _submit(executor: Runs, number: int, job: Job, record: _Record) -> None:
    executor.submit(f"job-{number}", job.prompt, job.params, record)


def _closed(executor: Runs, workload: Workload, clock: Callable[[], float]) -> Generator[None, None, DriveResult]:
    """Keep `concurrency` jobs running. The end, when fewer are left, does not count in tokens_per_s."""
    assert workload.concurrency is not None
    records: list[_Record] = []
    jobs = list(enumerate(workload.jobs))
    start = window_end = clock()
    window_tokens: int | None = None
    running: list[_Record] = []
    while jobs or running:
        while jobs and len(running) < workload.concurrency:
            number, job = jobs.pop(0)
            record = _Record(clock(), clock)
            records.append(record)
            running.append(record)
            _submit(executor, number, job, record)
        if not executor.step():
            raise RuntimeError("the executor is idle, but a request has not ended")
        running = [record for record in running if not record.finished]
        if window_tokens is None and not jobs and len(running) < workload.concurrency:
            window_end = clock()
            window_tokens = sum(len(record.token_ids) for record in records)
        yield
    busy_s = clock() - start
    assert window_tokens is not None
    return _result(records, window_tokens / (window_end - start), busy_s, 0.0)


def _open(executor: Runs, workload: Workload, clock: Callable[[], float]) -> Generator[None, None, DriveResult]:
    """Start jobs at their times. The clock skips idle time, which no policy can use, to the next arrival."""
    start = clock()
    skipped_s = 0.0

    def now_s() -> float:
        return clock() - start + skipped_s

    records: list[_Record] = []
    jobs = list(enumerate(workload.jobs))
    while True:
        while jobs and jobs[0][1].arrival_s <= now_s():
            number, job = jobs.pop(0)
            records.append(_Record(job.arrival_s, now_s))
            _submit(executor, number, job, records[-1])
        if executor.step():
            yield
            continue
        if not jobs:
            break
        skipped_s += max(0.0, jobs[0][1].arrival_s - now_s())
    busy_s = clock() - start
    num_tokens = sum(len(record.token_ids) for record in records)
    return _result(records, num_tokens / busy_s, busy_s, skipped_s)


def _result(records: list[_Record], tokens_per_s: float, busy_s: float, skipped_s: float) -> DriveResult:
    return DriveResult(
        tokens_per_s,
        busy_s,
        skipped_s,
        tuple(record.timing() for record in records),
        tuple(tuple(record.token_ids) for record in records),
    )
