"""Time the points of a grid in interleaved rounds, and the draft and verify streams concurrently."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from faser_trtllm.core.cost_table import ALL, CostSample, Interference
from faser_trtllm.core.curve_error import fit_curves
from faser_trtllm.profiling.disturbance import Disturbance
from faser_trtllm.profiling.grid import Point
from faser_trtllm.profiling.probe import DRAFTED, Probe

MIN_ROUNDS, MAX_ROUNDS = 3, 25
RUNS_PER_VISIT = 4  # runs of a segment or exit, whose first is dropped (cold caches); a point runs once less
WARM_RUNS = 16  # runs before a pass without drafts, to warm the caches as in service
QUICK_RUNS, QUICK_WARM_RUNS = 2, 3  # RUNS_PER_VISIT and WARM_RUNS of a quick profile
SMALL_ROWS, SMALL_ROUNDS = 9, 3  # passes of so few rows run so often in a quick profile's first round
FIRST_RUNS = 8  # extra runs before a kind's first point: pages are cold, and a CPU engine chooses its threads
NUM_NEEDED = 2  # points of a kind that are always measured, for a level and a slope
Tick = Callable[[int, int], None]  # rounds done, total rounds


@dataclass(frozen=True)
class Measured:
    """Samples to fit, held-out samples, and the number of rounds. warning: a sentence, "" if undisturbed."""

    samples: tuple[CostSample, ...]
    held_out: tuple[CostSample, ...]
    num_rounds: int
    warning: str = ""


def measure_points(
    probe: Probe,
    points: Sequence[Point],
    budget_s: float,
    tick: Tick | None = None,
    min_rounds: int = MIN_ROUNDS,
) -> Measured:
    """Visit all points in rounds, in random order; return each point's lower quartile over rounds of the best time.

    Other processes only ever add time, often for longer than a round: shuffling spreads that over all points, and the
    quartile discards it. The first round does not count; its time determines how many rounds fit budget_s.
    """
    runners = [(point, probe.runner(point)) for point in points]
    shuffle = random.Random(0).shuffle
    times: dict[Point, list[float]] = {point: [] for point in points}

    disturbance = Disturbance(probe.num_threads)

    def run_round(keep: bool) -> None:
        partition = ""
        shuffle(runners)
        # A change of partition moves the engines, so a round visits one partition after the other.
        runners.sort(key=lambda item: probe.partitions.index(item[0].partition))
        for point, run in runners:
            if point.partition != partition:
                partition = point.partition
                probe.use(partition)
            best = min(_visit(probe, point, run, RUNS_PER_VISIT - 1, WARM_RUNS))
            if keep:
                times[point].append(best)

    start = time.perf_counter()
    run_round(keep=False)
    fitting = int(budget_s / max(time.perf_counter() - start, 1e-9)) - 1
    num_rounds = max(min_rounds, min(MAX_ROUNDS, fitting))
    for number in range(num_rounds):
        run_round(keep=True)
        if tick is not None:
            tick(number + 1, num_rounds)
    return _measured(probe, {point: times[point] for point in points}, num_rounds, disturbance)


def measure_quickly(
    probe: Probe, points: Sequence[Point], budget_s: float, first_round_s: float, tick: Tick | None = None
) -> Measured:
    """Return each point's lower quartile over all runs, in one round and as many more as fit budget_s.

    Small passes run first and several times, since most steps of a stream are small, and decisions about rows depend on
    a few percent. After first_round_s only the points that every curve needs run: a large model's costs are
    extrapolated.
    """
    ordered = sorted(
        points, key=lambda point: (probe.partitions.index(point.partition), point.held_out, point.num_rows)
    )
    needed = _needed(ordered)
    runners = {point: probe.runner(point) for point in ordered}
    times: dict[Point, list[float]] = {point: [] for point in ordered}
    disturbance = Disturbance(probe.num_threads)
    small = [point for point in ordered if point.num_rows <= SMALL_ROWS and not point.held_out]
    visits = small * (SMALL_ROUNDS - 1) + ordered
    num_rounds, partition = 0, ""
    begun: set[tuple[str, str]] = set()
    start = time.perf_counter()
    while True:
        for number, point in enumerate(visits):
            elapsed_s = time.perf_counter() - start
            if num_rounds == MAX_ROUNDS or (num_rounds and elapsed_s > budget_s):
                return _measured(probe, {point: ms for point, ms in times.items() if ms}, num_rounds, disturbance)
            is_late = elapsed_s > first_round_s
            if is_late and (point not in needed or times[point]):
                continue
            if point.partition != partition:
                partition = point.partition
                probe.use(partition)
            if (point.kind, point.partition) not in begun:
                begun.add((point.kind, point.partition))
                _visit(probe, point, runners[point], FIRST_RUNS, 0)
            num_runs, num_warm = (1, 1) if is_late else (QUICK_RUNS, QUICK_WARM_RUNS)
            times[point] += _visit(probe, point, runners[point], num_runs, num_warm)
            if tick is not None and not num_rounds:
                tick(number + 1, len(visits))
        visits = ordered
        num_rounds += 1


def measure_again(
    measured: Measured,
    points: Sequence[Point],
    measure: Callable[[Sequence[Point]], Measured],
    sizes: tuple[int, ...] = (),
) -> Measured:
    """Measure the points of doubtful curves once more and keep, per curve, the samples that fit better."""
    before = fit_curves(measured.samples, measured.held_out, sizes)[1]
    doubtful = {key for key, error in before.items() if error.is_doubtful}
    points = [point for point in points if point.curve in doubtful]
    if not points:
        return measured
    again = measure(points)
    after = fit_curves(again.samples, again.held_out, sizes)[1]
    better = {key for key, error in after.items() if error.worst < before[key].worst}

    def chosen(old: Sequence[CostSample], new: Sequence[CostSample]) -> tuple[CostSample, ...]:
        return (*(s for s in old if s.curve not in better), *(s for s in new if s.curve in better))

    return replace(
        measured, samples=chosen(measured.samples, again.samples), held_out=chosen(measured.held_out, again.held_out)
    )


def _needed(ordered: Sequence[Point]) -> set[Point]:
    """Return the first NUM_NEEDED points of each kind and partition, one held-out, and one request's widest pass."""
    kinds: dict[tuple[str, str, bool], list[Point]] = {}
    for point in ordered:
        kinds.setdefault((point.kind, point.partition, point.held_out), []).append(point)
    found = {point for key, group in kinds.items() for point in group[: 1 if key[2] else NUM_NEEDED]}
    return found.union([p for p in ordered if p.kind == "verify" and p.num_requests == 1 and not p.held_out][-1:])


def _visit(probe: Probe, point: Point, run: Callable[[], float], num_runs: int, num_warm: int) -> list[float]:
    """Return the ms of each run. A pass runs after one of the other engine, except passes without drafts."""
    if point.kind == "decode":
        for _ in range(num_warm):
            run()
    found = []
    for _ in range(num_runs):
        probe.displace(point)
        found.append(run())
    return found


def _measured(
    probe: Probe, times: Mapping[Point, Sequence[float]], num_rounds: int, disturbance: Disturbance
) -> Measured:
    warning = disturbance.warning(list(times.values()))
    probe.use(ALL)
    experts = probe.num_experts
    samples = [
        (point.held_out, sample_of(point, lower_quartile(ms), experts.get(point, 0.0))) for point, ms in times.items()
    ]
    return Measured(
        tuple(sample for held_out, sample in samples if not held_out),
        tuple(sample for held_out, sample in samples if held_out),
        num_rounds,
        warning,
    )


def lower_quartile(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]


def sample_of(point: Point, ms: float, num_experts: float = 0.0) -> CostSample:
    """Return a sample, whose context is the mean number of tokens that a row attends to."""
    rows_each = DRAFTED if point.kind == "draft_step" else point.num_rows / point.num_requests
    context_len = point.context_len + round((rows_each + 1) / 2)
    return CostSample(point.kind, point.num_rows, point.num_requests, context_len, ms, point.partition, num_experts)


def measure_segments(
    probe: Probe, row_counts: Sequence[tuple[int, int]], num_rounds: int, context_len: int
) -> list[CostSample]:
    """Return samples "segment:I" at (num_rows, num_requests); [] if the target has one segment."""
    num_segments = len(probe.target.spec.segments) - 1
    if num_segments < 2:
        return []
    times: dict[tuple[int, int], list[list[float]]] = {pair: [] for pair in row_counts}
    experts: dict[tuple[int, int], float] = {}
    for number in range(num_rounds + 1):
        for rows, requests in row_counts:
            seen = [probe.segment_ms(rows, requests, context_len) for _ in range(RUNS_PER_VISIT)]
            experts[rows, requests] = probe.target.distinct_experts
            if number:
                times[rows, requests] += seen[1:]
    return [
        CostSample(f"segment:{segment}", *shape, context_len, statistics.median(column), num_experts=experts[shape])
        for shape, runs in times.items()
        for segment, column in enumerate(zip(*runs, strict=True))
    ]


def measure_exits(probe: Probe, row_counts: Sequence[int], num_rounds: int) -> list[CostSample]:
    """Return samples "exit:I" of scoring candidates at the boundaries, where the work is the same at each."""
    num_segments = len(probe.target.spec.segments) - 1
    times: dict[int, list[float]] = {rows: [] for rows in row_counts}
    for number in range(num_rounds + 1 if num_segments > 1 else 0):
        for rows in row_counts:
            seen = probe.exit_ms(rows, RUNS_PER_VISIT)
            if number:
                times[rows] += seen[1:]
    return [
        CostSample(f"exit:{boundary}", rows, rows, 0, statistics.median(values))
        for rows, values in times.items()
        for boundary in range(1, num_segments)
        if values
    ]


def measure_interference(probe: Probe, pairs: Sequence[tuple[Point, Point]], num_runs: int) -> Interference:
    """Measure how much the draft and verify streams, each in its own thread, slow each other down.

    pairs: (draft point, verify point), always of the same partitions. Returns medians of (ms together / ms alone).
    """
    draft_factors, verify_factors = [], []
    draft_partition, verify_partition = pairs[0][0].partition, pairs[0][1].partition
    assert probe.draft is not None
    probe.use(draft_partition, probe.draft)
    probe.use(verify_partition, probe.target)
    try:
        for draft_point, verify_point in pairs:
            draft, verify = probe.runner(draft_point), probe.runner(verify_point)
            draft_alone = _in_stream(probe, draft_partition, lambda run=draft: _times(run, num_runs))  # type: ignore[misc]
            verify_alone = _in_stream(probe, verify_partition, lambda run=verify: _times(run, num_runs))  # type: ignore[misc]
            draft_both, verify_both = _side_by_side(probe, draft_point, draft, verify_point, verify, num_runs)
            draft_factors.append(statistics.median(draft_both) / statistics.median(draft_alone))
            verify_factors.append(statistics.median(verify_both) / statistics.median(verify_alone))
    finally:
        probe.use(ALL)
    return Interference(
        draft_partition, verify_partition, statistics.median(draft_factors), statistics.median(verify_factors)
    )


def _side_by_side(
    probe: Probe,
    draft_point: Point,
    draft: Callable[[], float],
    verify_point: Point,
    verify: Callable[[], float],
    num_runs: int,
) -> tuple[list[float], list[float]]:
    """Run both streams until verify has run num_runs times; return the times of draft and of verify."""
    done = threading.Event()
    draft_times: list[float] = []

    def draft_stream() -> list[float]:
        draft_times.append(draft())  # a busy machine may start this thread after the other has ended
        while not done.is_set():
            draft_times.append(draft())
        return draft_times

    worker = threading.Thread(target=lambda: _pinned(probe, draft_point.partition, draft_stream))
    worker.start()
    try:
        verify_times = _in_stream(probe, verify_point.partition, lambda: _times(verify, num_runs))
    finally:
        done.set()
        worker.join()
    return draft_times[1:] or draft_times, verify_times


def _in_stream(probe: Probe, partition: str, work: Callable[[], list[float]]) -> list[float]:
    """Run work in its own thread, so that pinning ends with it; RuntimeError if the thread fails."""
    result: list[float] = []
    worker = threading.Thread(target=lambda: result.extend(_pinned(probe, partition, work)))
    worker.start()
    worker.join()
    if not result:
        raise RuntimeError(f"measuring on the partition {partition!r} failed, see the thread's error")
    return result


def _pinned(probe: Probe, partition: str, work: Callable[[], list[float]]) -> list[float]:
    probe.pin(partition)
    return work()


def _times(run: Callable[[], float], num_runs: int) -> list[float]:
    run()
    return [run() for _ in range(num_runs)]
