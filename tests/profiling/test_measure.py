"""Passes are timed as service runs them: behind the other engine's, or many of the same one after the other."""

from faser_trtllm.profiling.grid import Point
from faser_trtllm.profiling.measure import measure_points

COLD_PASSES = 12  # that take twice as long
DECODE, VERIFY = (Point(kind, "all", 2, 2, 64) for kind in ("decode", "verify"))


class Caches:
    """A Probe of which passes are twice as slow until so many have followed each other."""

    partitions = ("all",)

    def __init__(self):
        self._num_passes = 0
        self._last = None

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
