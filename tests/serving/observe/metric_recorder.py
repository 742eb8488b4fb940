"""A stand-in for EdgeApi.MetricFamily that keeps what it is told, and which threads told it.

As in Triton, a metric that is made again has the value it had.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from types import SimpleNamespace


class FakeMetricFamily:
    """values: (name, labels but model and version) -> number; histograms: the same -> {"counts", "sum", "bounds"}."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    values: dict = {}  # noqa: RUF012
    histograms: dict = {}  # noqa: RUF012
    threads: set = set()  # noqa: RUF012
    num_calls = 0

    @classmethod
    def reset(cls):
        cls.values, cls.histograms, cls.threads, cls.num_calls = {}, {}, set(), 0

    def __init__(self, name, description, kind):
        assert description
        self._name, self._kind = name, kind
        self._made = set()

    def Metric(self, labels, buckets=None):  # noqa: N802
        assert all(isinstance(part, str) for item in labels.items() for part in item)
        own = tuple(sorted((k, v) for k, v in labels.items() if k not in ("model", "version")))
        key = (self._name, *own)
        assert key not in self._made, "two metrics with the same labels"
        self._made.add(key)
        if self._kind == self.HISTOGRAM:
            self.histograms[key] = {"counts": [0] * (len(buckets) + 1), "sum": 0.0, "bounds": buckets}
            return SimpleNamespace(observe=lambda value: self._observe(key, value))
        assert buckets is None
        self.values.setdefault(key, 0.0)
        if self._kind == self.COUNTER:
            return SimpleNamespace(increment=lambda value: self._increment(key, value))
        return SimpleNamespace(set=lambda value: self._set(key, value))

    def _note(self):
        FakeMetricFamily.threads.add(threading.current_thread().name)
        FakeMetricFamily.num_calls += 1

    def _increment(self, key, value):
        self._note()
        assert value >= 0, "a counter only grows"
        self.values[key] += value

    def _set(self, key, value):
        self._note()
        self.values[key] = value

    def _observe(self, key, value):
        self._note()
        histogram = self.histograms[key]
        histogram["counts"][bisect_left(histogram["bounds"], value)] += 1
        histogram["sum"] += value
