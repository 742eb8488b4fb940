"""Publishes metrics on Triton's /metrics.

Metrics have TensorRT-LLM's names where those exist, otherwise names under faser_ like vLLM's; metrics with the same
meaning as one of vLLM's also appear under its name. The executor counts. Once a second, with every answer to a ping,
the engine process sends the changes as a frame, which one thread of the Triton backend applies.
"""

from __future__ import annotations

import itertools
import logging
import math
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from faser_trtllm.errors import FaserError
from faser_trtllm.executor.stats import HISTOGRAMS
from faser_trtllm.serving.engine_process import wire
from faser_trtllm.serving.engine_process.connection import Connection
from faser_trtllm.serving.engine_process.wire import ToBackend
from faser_trtllm.serving.observe.families import (
    FAILURE_CODES,
    FAILURES,
    FAMILIES,
    FINISH_REASONS,
    HISTOGRAM_FAMILIES,
    PREFIX,
    READY,
    SUCCESSES,
    VLLM_FAMILIES,
    VLLM_HISTOGRAM_FAMILIES,
    VLLM_PREFIX,
    Family,
    HistogramFamily,
    Stats,
)

log = logging.getLogger("faser.metrics")

TRTLLM_LABELS = {"model": "tensorrt_llm", "version": "1"}
_DECLARE, _ADD, _SET, _OBSERVE = 1, 2, 3, 4  # MetricOp of plugins/triton/wire.h
_KINDS = ("counter", "gauge", "histogram")
_CHANGE = struct.Struct("<BId")
_DECLARATION = struct.Struct("<BIB")


class MetricChanges:
    """Collects changes of metrics into frames. One thread makes changes; any thread may flush."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._data = bytearray()
        self._numbers = itertools.count(1)

    def declare(
        self, kind: str, name: str, help_text: str, labels: Mapping[str, str], buckets: Sequence[float] = ()
    ) -> int:
        """Declare a series (counter, gauge, or histogram with buckets); return the number that changes refer to."""
        number = next(self._numbers)
        parts = [_DECLARATION.pack(_DECLARE, number, _KINDS.index(kind)), wire.text(name), wire.text(help_text)]
        parts.append(struct.pack("<I", len(labels)))
        for label, value in labels.items():
            parts += wire.text(label), wire.text(value)
        parts.append(struct.pack(f"<I{len(buckets)}d", len(buckets), *buckets))
        self._put(b"".join(parts))
        return number

    def add(self, number: int, value: float) -> None:
        self._put(_CHANGE.pack(_ADD, number, value))

    def set(self, number: int, value: float) -> None:
        self._put(_CHANGE.pack(_SET, number, value))

    def observe(self, number: int, value: float) -> None:
        self._put(_CHANGE.pack(_OBSERVE, number, value))

    def flush(self) -> None:
        """Send the changes since the last call."""
        with self._lock:
            data, self._data = self._data, bytearray()
        if data:
            self._connection.send(ToBackend.METRICS, bytes(data))

    def _put(self, change: bytes) -> None:
        with self._lock:
            self._data += change


class ModelMetrics:
    """The metrics of one model. Any thread may call ended(), one thread publish().

    Of the models that share an engine process, only one is given the executor's counts, so that sums over models are
    right.
    """

    def __init__(self, changes: MetricChanges, model: str, version: str) -> None:
        labels = {"model": model, "version": version}
        vllm_labels = {"model_name": model, "engine": "0"}

        def labels_of(name: str) -> dict[str, str]:
            """Return the labels of a metric; those with TensorRT-LLM's names always have its model tensorrt_llm."""
            return TRTLLM_LABELS if name.startswith("nv_") else vllm_labels if name.startswith(VLLM_PREFIX) else labels

        self._changes = changes
        counts, histograms = (*FAMILIES, *VLLM_FAMILIES), (*HISTOGRAM_FAMILIES, *VLLM_HISTOGRAM_FAMILIES)
        self._families: list[_Counts | _Replay] = [_Counts(changes, labels_of(f.name), f) for f in counts]
        self._families += [_Replay(changes, labels_of(f.name), f) for f in histograms]
        self._ready = _Counts(changes, labels, READY)
        name, text = SUCCESSES
        self._successes = {
            reason: [
                changes.declare("counter", one, text, labels_of(one) | {"finished_reason": reason})
                for one in (name, VLLM_PREFIX + name.removeprefix(PREFIX))
            ]
            for reason in FINISH_REASONS
        }
        self._failures = {
            code: [changes.declare("counter", *FAILURES, labels | {"code": code})] for code in FAILURE_CODES
        }
        self._ended: Counter[int] = Counter()  # series number -> requests that ended
        self._lock = threading.Lock()

    def publish(self, is_ready: bool, stats: Mapping[str, float] | None = None) -> None:
        """Publish changes. is_ready: requests are served. stats: Executor.stats() with num_restarts."""
        try:
            self._ready.publish(Stats({"is_ready": float(is_ready)}))
            if stats is not None:
                timed = Stats({**stats, "timestamp": time.time()})
                for family in self._families:
                    family.publish(timed)
        except Exception:
            log.exception("metrics could not be published")
        with self._lock:
            ended, self._ended = self._ended, Counter()
        for number, count in ended.items():
            self._changes.add(number, count)

    def ended(self, reason: str | None, error: FaserError | None = None) -> None:
        """Count a request that ended with a finish reason or an error, possibly before it reached the engine."""
        if error is None:
            numbers = self._successes.get(reason or "", [])
        else:
            numbers = self._failures.get(error.code, self._failures["INTERNAL"])
        with self._lock:
            self._ended.update(numbers)


class _Counts:
    """Publishes a counter or gauge family; sends only the series that changed."""

    def __init__(self, changes: MetricChanges, labels: Mapping[str, str], spec: Family) -> None:
        self._changes = changes
        self._labels = labels
        self._spec = spec
        self._numbers: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def publish(self, stats: Stats) -> None:
        spec, changes = self._spec, self._changes
        for key, value in spec.read(stats).items():
            if key not in self._numbers:
                labels = {**self._labels, **({spec.label: key} if spec.label else {})}
                self._numbers[key] = changes.declare(spec.kind, spec.name, spec.help, labels)
                # Triton keeps a series when its model is unloaded: counters continue, gauges must be set again.
                self._last[key] = 0.0 if spec.kind == "counter" else math.nan
            last = self._last[key]
            if spec.kind == "counter":
                if value <= last:
                    continue
                changes.add(self._numbers[key], value - last)
            elif value != last:
                changes.set(self._numbers[key], value)
            self._last[key] = value


class _Replay:
    """Publishes a histogram family: sends Triton as many values per bucket as the engine counted, with the same sum."""

    def __init__(self, changes: MetricChanges, labels: Mapping[str, str], spec: HistogramFamily) -> None:
        self._changes = changes
        self._labels = {**labels, **dict(spec.labels)}
        self._spec = spec
        self._bounds = HISTOGRAMS[spec.key]
        self._number: int | None = None
        self._counts = [0.0] * (len(self._bounds) + 1)
        self._sums = [0.0] * (len(self._bounds) + 1)

    def publish(self, stats: Stats) -> None:
        counts, sums = stats.series(self._spec.key), stats.series(f"{self._spec.key}_sum")
        if len(counts) != len(self._counts) or len(sums) != len(self._sums):
            return
        if self._number is None:
            spec = self._spec
            self._number = self._changes.declare("histogram", spec.name, spec.help, self._labels, self._bounds)
        for place, (count, total) in enumerate(zip(counts, sums, strict=True)):
            number = round(count - self._counts[place])
            if number <= 0:
                continue
            mean = (total - self._sums[place]) / number
            for _ in range(number):
                self._changes.observe(self._number, self._inside(place, mean))
            self._counts[place], self._sums[place] = count, total

    def _inside(self, place: int, value: float) -> float:
        """Clamp a mean to its bucket, since rounding may have moved it out."""
        low = math.nextafter(self._bounds[place - 1], math.inf) if place else -math.inf
        high = self._bounds[place] if place < len(self._bounds) else math.inf
        return min(max(value, low), high)
