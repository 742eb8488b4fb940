"""Publishes metrics on Triton's /metrics, with TensorRT-LLM's names where they exist, else vLLM's under faser_.

Triton's histograms take one value at a time, and its metrics may not be touched by several threads at once: the
executor counts, one thread publishes the changes once a second, and one thread of the Triton backend applies them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from faser_trtllm.executor.stats import HISTOGRAMS
from faser_trtllm.serving.observe.families import (
    FAILURE_CODES,
    FAILURES,
    FAMILIES,
    FINISH_REASONS,
    HISTOGRAM_FAMILIES,
    READY,
    SUCCESSES,
    Family,
    HistogramFamily,
    Stats,
)
from faser_trtllm.serving.worker.messages import Chunk, Failed

log = logging.getLogger("faser.metrics")

TRTLLM_LABELS = {"model": "tensorrt_llm", "version": "1"}
PERIOD_S = 1.0  # longest time between two publications, also while no engine process answers


class ModelMetrics:
    """Publishes from its own thread between start() and close(); the other methods may be called from any thread.

    Ended requests are counted per model. The executor's counts are published only by the model that receives
    set_stats(), so that sums over models are right when several models share an engine process.
    """

    def __init__(self, api: Any, model: str, version: str) -> None:
        self._api = api
        self._labels = {"model": model, "version": version}
        self._families = [_Counts(self._new(f.name, f.help, f.kind), self._labels_of(f.name), f) for f in FAMILIES]
        self._histograms = [
            _Replay(self._new(f.name, f.help, "histogram"), self._labels_of(f.name), f) for f in HISTOGRAM_FAMILIES
        ]
        self._ready = _Counts(self._new(READY.name, READY.help, READY.kind), self._labels, READY)
        self._end_families: list[Any] = []
        self._successes = self._ends(*SUCCESSES, "finished_reason", FINISH_REASONS)
        self._failures = self._ends(*FAILURES, "code", FAILURE_CODES)
        self._is_ready: Callable[[], bool] = lambda: False
        self._stats: Mapping[str, float] = {}
        self._ended: Counter[tuple[bool, str]] = Counter()  # (was successful, finish reason or status code)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="faser-metrics", daemon=True)

    def start(self, is_ready: Callable[[], bool]) -> None:
        """is_ready: tells whether requests would be served now."""
        self._is_ready = is_ready
        self._thread.start()

    def close(self) -> None:
        """Publish the last changes and end the thread; no metric is touched after that."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def set_stats(self, stats: Mapping[str, float]) -> None:
        """Publish the latest Executor.stats() with num_restarts."""
        self._stats = {**stats, "timestamp": time.time()}
        self._wake.set()

    def record(self, event: Chunk | Failed) -> None:
        """A request ended."""
        if isinstance(event, Failed):
            self.refused(event.code)
        else:
            with self._lock:
                self._ended[True, event.finish_reason or ""] += 1

    def refused(self, code: str) -> None:
        """A request failed with this code, possibly before it reached the engine."""
        with self._lock:
            self._ended[False, code] += 1

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing
            self._wake.clear()
            try:
                self._publish()
            except Exception:
                log.exception("metrics could not be published")
            if not closing:
                self._wake.wait(PERIOD_S)

    def _publish(self) -> None:
        self._ready.publish(Stats({"is_ready": float(self._is_ready())}))
        if self._stats:
            stats = Stats(self._stats)
            families: list[_Counts | _Replay] = [*self._families, *self._histograms]
            for family in families:
                family.publish(stats)
        with self._lock:
            ended, self._ended = self._ended, Counter()
        for (well, reason), number in ended.items():
            metric = self._successes.get(reason) if well else self._failure(reason)
            if metric is not None:
                metric.increment(number)

    def _labels_of(self, name: str) -> dict[str, str]:
        """TensorRT-LLM's names come from its model tensorrt_llm, whichever model of ours publishes them."""
        return TRTLLM_LABELS if name.startswith("nv_") else self._labels

    def _failure(self, code: str) -> Any:
        return self._failures.get(code) or self._failures["INTERNAL"]

    def _new(self, name: str, text: str, kind: str) -> Any:
        kinds = self._api.MetricFamily
        return kinds(name=name, description=text, kind=getattr(kinds, kind.upper()))

    def _ends(self, name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Any]:
        family = self._new(name, text, "counter")
        self._end_families.append(family)  # Triton removes the metrics of a family that is garbage collected
        return {value: family.Metric(labels=self._labels | {label: value}) for value in values}


class _Counts:
    """A counter or gauge family; updates only the series that changed."""

    def __init__(self, family: Any, labels: dict[str, str], spec: Family) -> None:
        self._family = family
        self._labels = labels
        self._spec = spec
        self._metrics: dict[str, Any] = {}
        self._last: dict[str, float] = {}

    def publish(self, stats: Stats) -> None:
        for key, value in self._spec.read(stats).items():
            if key not in self._metrics:
                labels = self._labels | ({self._spec.label: key} if self._spec.label else {})
                self._metrics[key] = self._family.Metric(labels=labels)
                # Triton keeps a series when its model is unloaded: counters continue, gauges must be set again.
                self._last[key] = 0.0 if self._spec.kind == "counter" else math.nan
            last = self._last[key]
            if self._spec.kind == "counter":
                if value <= last:
                    continue
                self._metrics[key].increment(value - last)
            elif value != last:
                self._metrics[key].set(value)
            self._last[key] = value


class _Replay:
    """A histogram family: replays to Triton as many values per bucket as the engine counted, with the same sum."""

    def __init__(self, family: Any, labels: dict[str, str], spec: HistogramFamily) -> None:
        self._bounds = HISTOGRAMS[spec.key]
        self._family = family
        self._labels = labels | dict(spec.labels)
        self._metric: Any = None
        self._key = spec.key
        self._counts = [0.0] * (len(self._bounds) + 1)
        self._sums = [0.0] * (len(self._bounds) + 1)

    def publish(self, stats: Stats) -> None:
        counts, sums = stats.series(self._key), stats.series(f"{self._key}_sum")
        if len(counts) != len(self._counts) or len(sums) != len(self._sums):
            return
        if self._metric is None:
            self._metric = self._family.Metric(labels=self._labels, buckets=list(self._bounds))
        for place, (count, total) in enumerate(zip(counts, sums, strict=True)):
            number = round(count - self._counts[place])
            if number <= 0:
                continue
            mean = (total - self._sums[place]) / number
            for _ in range(number):
                self._metric.observe(self._inside(place, mean))
            self._counts[place], self._sums[place] = count, total

    def _inside(self, place: int, value: float) -> float:
        """Clamp a value to its bucket, which rounding of the mean may have left."""
        low = math.nextafter(self._bounds[place - 1], math.inf) if place else -math.inf
        high = self._bounds[place] if place < len(self._bounds) else math.inf
        return min(max(value, low), high)
