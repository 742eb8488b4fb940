"""Driving a workload, with a fake executor and a clock that stands still until told."""

from dataclasses import dataclass, field

import pytest

from benchmarks.policies.drive import drive, drive_steps
from benchmarks.policies.stopwatch import Stopwatch
from benchmarks.policies.workload import Job, Workload
from faser_trtllm.core.request import FinishReason
from faser_trtllm.core.sampling_params import SamplingParams


@dataclass
class Output:
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass
class FakeExecutor:
    """A step takes 1 s and gives each request one token; at most max_running at once, the others wait."""

    max_running: int = 100
    now_s: float = 0.0
    running: dict = field(default_factory=dict)
    num_running: list = field(default_factory=list)
    submitted_s: dict = field(default_factory=dict)

    def clock(self) -> float:
        return self.now_s

    def submit(self, request_id, prompt_token_ids, params, sink) -> None:
        self.running[request_id] = [params.max_tokens, sink]
        self.submitted_s[request_id] = self.now_s

    def step(self) -> bool:
        if not self.running:
            return False
        self.now_s += 1.0
        active = list(self.running.items())[: self.max_running]
        self.num_running.append(len(self.running))
        for request_id, entry in active:
            entry[0] -= 1
            done = entry[0] == 0
            entry[1](Output((7,), FinishReason.LENGTH if done else None))
            if done:
                del self.running[request_id]
        return True


def job(num_tokens: int, arrival_s: float = 0.0) -> Job:
    return Job((1,), SamplingParams(max_tokens=num_tokens), arrival_s)


def test_closed_loop_keeps_streams_busy_and_counts_that_time_only() -> None:
    executor = FakeExecutor()
    workload = Workload("w", (job(2), job(2), job(2), job(6)), 2)
    result = drive(executor, workload, executor.clock)
    # Two at a time: jobs 0 and 1 for 2 s, then 2 and 3 until job 2 ends at 4 s; job 3 runs on alone to 8 s.
    assert executor.num_running == [2, 2, 2, 2, 1, 1, 1, 1]
    assert result.tokens_per_s == pytest.approx(8 / 4)
    assert result.busy_s == pytest.approx(8.0)
    assert [len(ids) for ids in result.token_ids] == [2, 2, 2, 6]
    assert [t.ttft_s for t in result.timings] == [1.0] * 4
    assert [t.per_token_s for t in result.timings] == [1.0] * 4


def test_open_loop_waits_for_arrivals_and_skips_idle_time() -> None:
    executor = FakeExecutor()
    workload = Workload("w", (job(3), job(2, 1.5), job(2, 100.0)), None)
    result = drive(executor, workload, executor.clock)
    assert list(executor.submitted_s.values()) == [0.0, 2.0, 4.0]  # the last came at 100 s, 96 s of them skipped
    assert result.skipped_s == pytest.approx(96.0)
    assert result.busy_s == pytest.approx(6.0)
    assert result.tokens_per_s == pytest.approx(7 / 6)
    assert [t.ttft_s for t in result.timings] == pytest.approx([1.0, 1.5, 1.0])  # the second waited for a step's end


def test_waiting_in_the_queue_counts_as_time_to_first_token() -> None:
    executor = FakeExecutor(max_running=1)
    result = drive(executor, Workload("w", (job(5), job(1, 1.0)), None), executor.clock)
    assert [t.ttft_s for t in result.timings] == pytest.approx([1.0, 5.0])
    assert result.timings[1].per_token_s is None


def test_an_idle_executor_with_open_requests_is_an_error() -> None:
    executor = FakeExecutor()
    executor.step = lambda: False
    with pytest.raises(RuntimeError, match="idle"):
        drive(executor, Workload("w", (job(1),), 1), executor.clock)


@pytest.mark.parametrize("concurrency", [2, None])
def test_turns_change_nothing_that_a_stopped_clock_shows(concurrency: int | None) -> None:
    workload = Workload("w", (job(2), job(3, 1.5), job(2, 100.0), job(6, 100.0)), concurrency)
    alone = FakeExecutor()
    expected = drive(alone, workload, alone.clock)
    wall_s = [0.0]
    executor = FakeExecutor()
    watch = Stopwatch(lambda: wall_s[0] + executor.now_s)
    run, result = drive_steps(executor, workload, watch.now_s), None
    while result is None:
        watch.start()
        try:
            next(run)
        except StopIteration as end:
            result = end.value
        watch.stop()
        wall_s[0] += 1000.0
    assert result == expected


def test_a_stopwatch_stands_still_before_its_start_and_while_stopped() -> None:
    source_s = [10.0]
    watch = Stopwatch(lambda: source_s[0])
    source_s[0] += 1.0
    assert watch.now_s() == 0.0
    watch.stop()  # it did not run
    watch.start()
    source_s[0] += 2.0
    watch.start()  # it runs already
    assert watch.now_s() == 2.0
    watch.stop()
    source_s[0] += 4.0
    watch.start()
    source_s[0] += 1.0
    assert watch.now_s() == 3.0
