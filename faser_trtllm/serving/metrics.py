"""The model's metrics in Triton's /metrics: TensorRT-LLM's names where it has them, else vLLM's meaning under faser_.

Facts of Triton that shape it: a metric must be touched by one thread only, each touch is a round trip to the server,
and a histogram takes one value at a time. So the engine child counts, and one thread publishes what changed once a
second.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from faser_trtllm.executor.stats import HISTOGRAMS
from faser_trtllm.serving.messages import Chunk, Failed

log = logging.getLogger("faser.metrics")

PERIOD_S = 1.0  # at least so often, also while no engine process answers
FINISH_REASONS = ("stop", "length", "timeout")
FAILURE_CODES = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL")


class Stats:
    """Executor.stats() as a table: [key] gives a number, 0 if it is not there; series(name) all name[i]."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> float:
        return self._values.get(key, 0.0)

    def series(self, name: str) -> list[float]:
        found: list[float] = []
        while (value := self._values.get(f"{name}[{len(found)}]")) is not None:
            found.append(value)
        return found


Read = Callable[[Stats], Mapping[str, float]]
"""Values by the label's value; {"": value} of a family without a label of its own."""


@dataclass(frozen=True)
class Family:
    """One metric name: kind is counter or gauge; label is its own label, beside model and version."""

    name: str
    kind: str
    help: str
    read: Read
    label: str = ""


@dataclass(frozen=True)
class HistogramFamily:
    """A histogram, one value per request; key is its name in executor.stats.HISTOGRAMS, labels are constant ones."""

    name: str
    help: str
    key: str
    labels: tuple[tuple[str, str], ...] = ()


def _gauge(name: str, key: str, text: str, scale: float = 1.0) -> Family:
    return Family(name, "gauge", text, lambda stats: {"": scale * stats[key]})


def _counter(name: str, key: str, text: str) -> Family:
    return Family(name, "counter", text, lambda stats: {"": stats[key]})


def _by_index(name: str, key: str, label: str, text: str) -> Family:
    return Family(name, "counter", text, lambda stats: {str(i): n for i, n in enumerate(stats.series(key))}, label)


def _when_running(stats: Stats, key: str) -> float:
    """A number of the last step, which says nothing once the executor rests."""
    return stats[key] if stats["num_running"] else 0.0


def _kv_blocks(stats: Stats) -> dict[str, float]:
    total, free = stats["kv_num_blocks"], stats["kv_num_free_blocks"]
    return {
        "max": total,
        "free": free,
        "used": total - free,
        "tokens_per": stats["kv_tokens_per_block"],
        "reused": stats["kv_num_reused_blocks"],
        "fraction": _kv_usage(stats),
    }


def _kv_usage(stats: Stats) -> float:
    total = stats["kv_num_blocks"]
    return (total - stats["kv_num_free_blocks"]) / total if total else 0.0


def _requests(stats: Stats) -> dict[str, float]:
    return {
        "active": stats["num_running"],
        "max": stats["max_batch_size"],
        "scheduled": _when_running(stats, "num_scheduled"),
        "context": _when_running(stats, "num_context_requests"),
        "waiting": stats["num_waiting"],
    }


def _batcher(stats: Stats) -> dict[str, float]:
    return {
        "total_context_tokens": _when_running(stats, "num_context_tokens"),
        "generation_requests": _when_running(stats, "num_generation_requests"),
        "micro_batch_id": 0.0,
        "paused_requests": _when_running(stats, "num_paused"),
    }


def _cumulative(stats: Stats) -> dict[str, float]:
    """Counts of inter-token times up to each bound, by its le label."""
    bounds = [f"{bound:g}" for bound in HISTOGRAMS["inter_token_latency_s"]] + ["+Inf"]
    total, found = 0.0, {}
    for bound, count in zip(bounds, stats.series("inter_token_latency_s") or [0.0] * len(bounds), strict=True):
        total += count
        found[bound] = total
    return found


_ITL = "faser_inter_token_latency_seconds"
_ITL_HELP = "Seconds between two steps that gave a request tokens (vLLM: inter_token_latency); a histogram in counters"

FAMILIES = (
    Family(
        "nv_trt_llm_request_metrics",
        "gauge",
        "Requests: active (hold a slot), max (slots), scheduled and context (in the last step), waiting",
        _requests,
        "request_type",
    ),
    Family(
        "nv_trt_llm_kv_cache_block_metrics",
        "gauge",
        "KV cache blocks: max, free, used, tokens_per (tokens in one), reused (since the start), fraction (used/max)",
        _kv_blocks,
        "kv_cache_block_type",
    ),
    Family(
        "nv_trt_llm_inflight_batcher_metrics", "gauge", "The last step", _batcher, "inflight_batcher_specific_metric"
    ),
    Family(
        "nv_trt_llm_general_metrics",
        "gauge",
        "timestamp (Unix seconds of the engine's last answer) and iteration_counter (steps since its start)",
        lambda stats: {"timestamp": stats["timestamp"], "iteration_counter": stats["num_steps"]},
        "general_type",
    ),
    _gauge("faser_engine_ready", "is_ready", "1 while the engine process answers and takes requests, else 0"),
    _gauge("faser_num_requests_running", "num_running", "Requests that hold a slot"),
    _gauge("faser_num_requests_waiting", "num_waiting", "Requests in the queue"),
    Family(
        "faser_kv_cache_usage_perc", "gauge", "Share of KV cache blocks in use, 0 to 1", lambda s: {"": _kv_usage(s)}
    ),
    _gauge(
        "faser_price_tokens_per_second",
        "price_tokens_per_ms",
        "Goodput that the policy price expects, at which rows are bought; 0 with other policies",
        1e3,
    ),
    _counter("faser_engine_restarts_total", "num_restarts", "Times the engine process was started again"),
    _counter("faser_prompt_tokens_total", "num_prompt_tokens", "Prompt tokens of requests that ended"),
    _counter("faser_generation_tokens_total", "num_output_tokens", "Tokens committed"),
    _counter("faser_num_preemptions_total", "num_preemptions", "Preemptions of requests that ended"),
    _counter("faser_prefix_cache_queries_total", "num_prefix_tokens", "Prompt tokens looked up in the KV cache"),
    _counter("faser_prefix_cache_hits_total", "num_prefix_hit_tokens", "Prompt tokens found in the KV cache"),
    _counter("faser_spec_decode_num_drafts_total", "num_drafts", "Frontiers with drafts, one per request and step"),
    _counter("faser_spec_decode_num_draft_tokens_total", "num_draft_tokens", "Draft tokens"),
    _counter("faser_spec_decode_num_verified_tokens_total", "num_verified_tokens", "Draft tokens whose rows ran"),
    _counter(
        "faser_spec_decode_num_accepted_tokens_total",
        "num_accepted_tokens",
        "Accepted draft tokens; 1 + accepted/drafts is the mean acceptance length",
    ),
    _by_index(
        "faser_spec_decode_num_accepted_tokens_per_pos_total",
        "num_accepted_tokens_per_pos",
        "position",
        "Accepted draft tokens by their place in the frontier; 0 is the first",
    ),
    _counter("faser_spec_decode_num_pruned_rows_total", "num_pruned_rows", "Rows dropped inside verification passes"),
    _by_index(
        "faser_spec_decode_frontier_len_total",
        "num_frontiers_by_len",
        "length",
        "Frontiers by the number of drafts whose rows ran, one per request and step; 0: no speculation",
    ),
    _counter("faser_spec_decode_num_rows_total", "num_frontier_rows", "Rows that frontiers ran to the end"),
    _counter(
        "faser_spec_decode_num_oracle_rows_total",
        "num_oracle_rows",
        "Rows that would have been enough, had it been known which drafts are accepted",
    ),
    Family(
        "faser_steps_total",
        "counter",
        "Steps by the mode of the two lanes",
        lambda stats: {mode: stats[f"num_steps_{mode}"] for mode in ("serial", "draft_ahead", "ping_pong")},
        "mode",
    ),
    Family(
        "faser_lane_seconds_total",
        "counter",
        "Seconds spent: schedule, draft, verify (these two overlap unless the mode is serial), update",
        lambda stats: {lane: stats[f"{lane}_ms"] / 1e3 for lane in ("schedule", "draft", "verify", "update")},
        "lane",
    ),
    Family(f"{_ITL}_bucket", "counter", _ITL_HELP, _cumulative, "le"),
    Family(f"{_ITL}_sum", "counter", _ITL_HELP, lambda stats: {"": sum(stats.series("inter_token_latency_s_sum"))}),
    Family(f"{_ITL}_count", "counter", _ITL_HELP, lambda stats: {"": sum(stats.series("inter_token_latency_s"))}),
)

HISTOGRAM_FAMILIES = (
    HistogramFamily("faser_request_queue_time_seconds", "From arrival to the first slot", "queue_time_s"),
    HistogramFamily("faser_time_to_first_token_seconds", "From arrival to the first token", "time_to_first_token_s"),
    HistogramFamily(
        "faser_request_time_per_output_token_seconds",
        "Mean time per token after the first, one value per request that ended well",
        "time_per_output_token_s",
    ),
    HistogramFamily(
        "faser_e2e_request_latency_seconds",
        "From arrival to the last token of requests that ended well",
        "e2e_latency_s",
    ),
    HistogramFamily(
        "nv_llm_input_token_len",
        "Prompt tokens of requests that ended well",
        "input_token_len",
        (("response_metric_type", "total_input_tokens"),),
    ),
    HistogramFamily(
        "nv_llm_output_token_len",
        "Output tokens of requests that ended well",
        "output_token_len",
        (("response_metric_type", "total_output_tokens"),),
    ),
)

SUCCESSES = ("faser_request_success_total", "Requests that ended well, by finish_reason")
FAILURES = ("faser_request_failures_total", "Requests refused or ended with an error, by Triton's status code")


class ModelMetrics:
    """Publishes to Triton from a thread of its own, between start() and close(); news may come from any thread."""

    def __init__(self, pb_utils: Any, model: str, version: str) -> None:
        self._pb_utils = pb_utils
        self._labels = {"model": model, "version": version}
        self._families = [_Counts(self._new(f.name, f.help, f.kind), self._labels, f) for f in FAMILIES]
        self._histograms = [
            _Replay(self._new(f.name, f.help, "histogram"), self._labels, f) for f in HISTOGRAM_FAMILIES
        ]
        self._end_families: list[Any] = []
        self._successes = self._ends(*SUCCESSES, "finished_reason", FINISH_REASONS)
        self._failures = self._ends(*FAILURES, "code", FAILURE_CODES)
        self._is_ready: Callable[[], bool] = lambda: False
        self._stats: Mapping[str, float] = {}
        self._ended: Counter[tuple[bool, str]] = Counter()  # ended well; finish reason or status code
        self._num_restarts = 0.0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="faser-metrics", daemon=True)

    def start(self, is_ready: Callable[[], bool]) -> None:
        """is_ready: whether requests would be served now."""
        self._is_ready = is_ready
        self._thread.start()

    def close(self) -> None:
        """Publish what is left and end the thread: no metric is touched after that."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def set_stats(self, stats: Mapping[str, float]) -> None:
        """The latest of Executor.stats(), with num_restarts; published at once."""
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
        """A request ended with an error of this code, perhaps before it reached the engine."""
        with self._lock:
            self._ended[False, code] += 1

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(PERIOD_S)
            self._wake.clear()
            try:
                self._publish()
            except Exception:
                log.exception("metrics could not be published")

    def _publish(self) -> None:
        stats = Stats({**self._stats, "is_ready": float(self._is_ready())})
        restarted = stats["num_restarts"] != self._num_restarts
        self._num_restarts = stats["num_restarts"]
        families: list[_Counts | _Replay] = [*self._families, *self._histograms]
        for family in families:
            if restarted:
                family.forget()
            family.publish(stats)
        with self._lock:
            ended, self._ended = self._ended, Counter()
        for (well, reason), number in ended.items():
            metric = self._successes.get(reason) if well else self._failure(reason)
            if metric is not None:
                metric.increment(number)

    def _failure(self, code: str) -> Any:
        return self._failures.get(code) or self._failures["INTERNAL"]

    def _new(self, name: str, text: str, kind: str) -> Any:
        kinds = self._pb_utils.MetricFamily
        return kinds(name=name, description=text, kind=getattr(kinds, kind.upper()))

    def _ends(self, name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Any]:
        family = self._new(name, text, "counter")
        self._end_families.append(family)  # a family that is collected takes its metrics with it
        return {value: family.Metric(labels=self._labels | {label: value}) for value in values}


class _Counts:
    """A counter or gauge family; touches only the series that changed."""

    def __init__(self, family: Any, labels: dict[str, str], spec: Family) -> None:
        self._family = family
        self._labels = labels
        self._spec = spec
        self._metrics: dict[str, Any] = {}
        self._last: dict[str, float] = {}

    def forget(self) -> None:
        """The counts begin at 0 again, as a new engine process counts; except those of the edge itself."""
        if self._spec.kind == "counter" and self._spec.name != "faser_engine_restarts_total":
            self._last = dict.fromkeys(self._last, 0.0)

    def publish(self, stats: Stats) -> None:
        for key, value in self._spec.read(stats).items():
            if key not in self._metrics:
                labels = self._labels | ({self._spec.label: key} if self._spec.label else {})
                self._metrics[key] = self._family.Metric(labels=labels)
                self._last[key] = 0.0
            last = self._last[key]
            if self._spec.kind == "gauge" and value != last:
                self._metrics[key].set(value)
            elif value > last:
                self._metrics[key].increment(value - last)
            else:
                continue
            self._last[key] = value


class _Replay:
    """A histogram family: gives Triton as many values per bucket as the engine counted, with their sum."""

    def __init__(self, family: Any, labels: dict[str, str], spec: HistogramFamily) -> None:
        self._bounds = HISTOGRAMS[spec.key]
        self._family = family
        self._metric = family.Metric(labels=labels | dict(spec.labels), buckets=list(self._bounds))
        self._key = spec.key
        self.forget()

    def forget(self) -> None:
        self._counts = [0.0] * (len(self._bounds) + 1)
        self._sums = [0.0] * (len(self._bounds) + 1)

    def publish(self, stats: Stats) -> None:
        counts, sums = stats.series(self._key), stats.series(f"{self._key}_sum")
        if len(counts) != len(self._counts) or len(sums) != len(self._sums):
            return
        for place, (count, total) in enumerate(zip(counts, sums, strict=True)):
            number = round(count - self._counts[place])
            if number <= 0:
                continue
            mean = (total - self._sums[place]) / number
            for _ in range(number):
                self._metric.observe(self._inside(place, mean))
            self._counts[place], self._sums[place] = count, total

    def _inside(self, place: int, value: float) -> float:
        """Rounding must not carry a mean out of its bucket."""
        low = math.nextafter(self._bounds[place - 1], math.inf) if place else -math.inf
        high = self._bounds[place] if place < len(self._bounds) else math.inf
        return min(max(value, low), high)
