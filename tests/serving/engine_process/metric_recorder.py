"""A stand-in for MetricChanges that applies what it is told, by the rules of plugins/triton/metrics.cpp.

As in Triton, a series that is declared again has the value it had.
"""

from __future__ import annotations

from bisect import bisect_left


class MetricRecorder:
    """values: (name, labels but the model's) -> number; histograms: the same -> {"counts", "sum", "bounds"}.

    models: (name, label model) of every series.
    """

    def __init__(self):
        self.values, self.histograms, self.models = {}, {}, set()
        self.num_changes = 0
        self._series = []

    def declare(self, kind, name, help_text, labels, buckets=()):
        assert help_text
        assert kind in ("counter", "gauge", "histogram")
        assert all(isinstance(part, str) for item in labels.items() for part in item)
        model, other = ("model_name", "engine") if name.startswith("vllm:") else ("model", "version")
        self.models.add((name, labels[model]))
        assert labels[other]
        key = (name, *sorted((k, v) for k, v in labels.items() if k not in (model, other)))
        self._series.append((key, kind))
        assert (kind == "histogram") == bool(buckets)
        if kind == "histogram":
            self.histograms[key] = {"counts": [0] * (len(buckets) + 1), "sum": 0.0, "bounds": list(buckets)}
        else:
            self.values.setdefault(key, 0.0)
        return len(self._series) - 1

    def add(self, number, value):
        assert value >= 0, "a counter only grows"
        self.values[self._key(number, "counter")] += value

    def set(self, number, value):
        self.values[self._key(number, "gauge")] = value

    def observe(self, number, value):
        histogram = self.histograms[self._key(number, "histogram")]
        histogram["counts"][bisect_left(histogram["bounds"], value)] += 1
        histogram["sum"] += value

    def _key(self, number, kind):
        self.num_changes += 1
        key, own_kind = self._series[number]
        assert own_kind == kind
        return key
