"""Passes are timed as service runs them: behind the other engine's, or many of the same one after the other."""

import time
from collections import Counter

from faser_trtllm.core.cost_table import CostSample
from faser_trtllm.profiling.grid import Point
from faser_trtllm.profiling.measure import (
    FIRST_RUNS,
    MAX_ROUNDS,
    QUICK_RUNS,
    SMALL_ROUNDS,
    Measured,
    measure_again,
    measure_points,
    measure_quickly,
)

COLD_PASSES = 12  # that take twice as long
DECODE, VERIFY = (Point(kind, "all", 2, 2, 64) for kind in ("decode", "verify"))


class Caches:
    """A Probe of which passes are twice as slow until so many have followed each other."""

    partitions = ("all",)
    num_threads = 1

    def __init__(self):
        self._num_passes = 0
        self._last = None
        self.num_experts = {}

    def use(self, partition):
        self._last = None

    def displace(self, point):
        if point.kind == "verify":
            self._last = None

    def runner(self, point):
        def run():
            self._num_passes = self._num_passes + 1 if self._last is point else 1
            self._last = point
            return 2.0 if self._num_passes <= COLD_PASSES else 1.0

        return run


def test_a_pass_without_drafts_is_timed_warm_and_one_with_drafts_cold():
    found = measure_points(Caches(), [DECODE, VERIFY], budget_s=0.0, min_rounds=3)
    assert {sample.kind: sample.ms for sample in found.samples} == {"decode": 1.0, "verify": 2.0}
    assert found.num_rounds >= 3


def test_a_quick_round_that_takes_too_long_keeps_what_curves_need():
    points = [Point("verify", "all", rows, 1, 64) for rows in (1, 2, 3, 4, 9)]
    points += [Point("draft_step", "all", rows, rows, 64) for rows in (1, 2, 4)]
    points += [Point("draft_step", "all", rows, rows, 65, held_out=True) for rows in (3, 5)]
    hurried = measure_quickly(Caches(), points, budget_s=0.0, first_round_s=0.0)
    assert {(sample.kind, sample.num_rows) for sample in hurried.samples} == {
        ("verify", 1),
        ("verify", 2),
        ("verify", 9),
        ("draft_step", 1),
        ("draft_step", 2),
    }
    assert [sample.num_rows for sample in hurried.held_out] == [3], "a curve that nothing judges"
    whole = measure_quickly(Caches(), points, budget_s=0.0, first_round_s=1e9)
    assert len(whole.samples) + len(whole.held_out) == len(points)
    assert whole.num_rounds == 1


def test_quick_rounds_repeat_while_they_fit():
    found = measure_quickly(Caches(), [Point("verify", "all", 2, 1, 64)], budget_s=1e9, first_round_s=1e9)
    assert found.num_rounds == MAX_ROUNDS
    assert found.samples[0].ms == 2.0


def test_the_rest_of_a_quick_budget_goes_to_small_passes(monkeypatch):
    clock_s, num_runs = [0.0], Counter()

    class Timed(Caches):
        def runner(self, point):
            def run():
                num_runs[point.num_rows] += 1
                clock_s[0] += point.num_rows
                return 1e3 * point.num_rows

            return run

    monkeypatch.setattr(time, "perf_counter", lambda: clock_s[0])
    points = [Point("verify", "all", rows, 1, 64) for rows in (100, 1)]
    num_first = FIRST_RUNS + SMALL_ROUNDS * QUICK_RUNS
    found = measure_quickly(Timed(), points, budget_s=num_first + 200.0, first_round_s=1e9)
    assert num_runs == {1: num_first + QUICK_RUNS, 100: QUICK_RUNS}
    assert found.num_rounds == 1


def test_cold_pages_are_no_part_of_a_quick_profile():
    """The first passes of an engine's life, whatever their size."""

    class Loading(Caches):
        num_passes = 0

        def runner(self, point):
            def run():
                self.num_passes += 1
                return 50.0 if self.num_passes <= FIRST_RUNS else 1.0

            return run

    points = [Point("verify", "all", rows, 1, 64) for rows in (1, 2, 3)]
    found = measure_quickly(Loading(), points, budget_s=0.0, first_round_s=1e9)
    assert {sample.num_rows: sample.ms for sample in found.samples} == {1: 1.0, 2: 1.0, 3: 1.0}


AGAIN = [Point(kind, "all", rows, rows, 64) for kind in ("verify", "draft_step") for rows in (1, 2, 4, 8)]


def timed(factors):
    """Return the measurement of AGAIN, with each kind's times scaled by the factors of its points in turn."""
    return Measured(
        tuple(
            CostSample(p.kind, p.num_rows, p.num_requests, 64, p.num_rows * factor)
            for p, factor in zip(AGAIN, (*factors["verify"], *factors["draft_step"]), strict=True)
            if p.kind in factors
        ),
        (),
        1,
    )


def test_a_curve_that_does_not_fit_is_measured_again_and_the_better_half_stays():
    steady, shaken = (1.0, 1.0, 1.0, 1.0), (9.0, 1.0, 1.0, 0.1)
    asked = []

    def measure(points):
        asked.append({point.kind for point in points})
        return Measured(tuple(s for s in timed({"verify": steady, "draft_step": steady}).samples), (), 1)

    good = timed({"verify": steady, "draft_step": steady})
    assert measure_again(good, AGAIN, measure) is good
    assert not asked
    mended = measure_again(timed({"verify": shaken, "draft_step": steady}), AGAIN, measure)
    assert asked == [{"verify"}]
    assert {(s.kind, s.num_rows): s.ms for s in mended.samples} == {(p.kind, p.num_rows): p.num_rows for p in AGAIN}


def test_a_second_measurement_that_is_worse_is_not_used():
    shaken, worse = (9.0, 1.0, 1.0, 0.1), (90.0, 1.0, 1.0, 0.01)
    first = timed({"verify": shaken, "draft_step": (1.0,) * 4})
    second = timed({"verify": worse, "draft_step": (1.0,) * 4})
    assert set(measure_again(first, AGAIN, lambda points: second).samples) == set(first.samples)
