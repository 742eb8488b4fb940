"""Definitions of all metrics: name, kind, label, help text, and how to read them from the executor's stats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from faser_trtllm.config import DrafterName
from faser_trtllm.executor.guard import DisabledReason
from faser_trtllm.executor.stats import HISTOGRAMS

FINISH_REASONS = ("stop", "length", "timeout", "cancelled")
_DRAFT_MS = {DrafterName.MODEL: "draft_ms", DrafterName.SUFFIX: "free_draft_ms"}
COST_KINDS = ("verify", "decode", "draft_step", "draft_rows", "draft_block")  # kinds of passes with a cost curve
FAILURE_CODES = ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "INTERNAL")


class Stats:
    """The values of Executor.stats() by key, 0 for a missing one; series(name) lists name[0], name[1], ..."""

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
"""A function that returns the value of each label value; {"": value} for a family without a label."""


@dataclass(frozen=True)
class Family:
    """A counter or gauge, with one series for each value of its label."""

    name: str
    kind: str  # counter or gauge
    help: str
    read: Read
    label: str = ""  # name of its label in addition to model and version


@dataclass(frozen=True)
class HistogramFamily:
    """A histogram with one value per request."""

    name: str
    help: str
    key: str  # in executor.stats.HISTOGRAMS
    labels: tuple[tuple[str, str], ...] = ()  # constant ones


def _gauge(name: str, key: str, text: str, scale: float = 1.0) -> Family:
    return Family(name, "gauge", text, lambda stats: {"": scale * stats[key]})


def _counter(name: str, key: str, text: str) -> Family:
    return Family(name, "counter", text, lambda stats: {"": stats[key]})


def _by_index(name: str, key: str, label: str, text: str) -> Family:
    return Family(name, "counter", text, lambda stats: {str(i): n for i, n in enumerate(stats.series(key))}, label)


def _when_running(stats: Stats, key: str) -> float:
    """Return a count of the last step; 0 while the executor is idle."""
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
    """Return cumulative counts of inter-token latencies by upper bound, the label `le`."""
    bounds = [f"{bound:g}" for bound in HISTOGRAMS["inter_token_latency_s"]] + ["+Inf"]
    total, found = 0.0, {}
    for bound, count in zip(bounds, stats.series("inter_token_latency_s") or [0.0] * len(bounds), strict=True):
        total += count
        found[bound] = total
    return found


_ITL = "faser_inter_token_latency_seconds"
_ITL_HELP = (
    "Seconds between two steps in which a request got tokens (vLLM: inter_token_latency), a histogram in counters"
)

READY = _gauge(
    "faser_engine_ready", "is_ready", "1 while the engine process answers, makes progress and accepts requests, else 0"
)

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
        "nv_trt_llm_inflight_batcher_metrics",
        "gauge",
        "Counts of the last step",
        _batcher,
        "inflight_batcher_specific_metric",
    ),
    Family(
        "nv_trt_llm_general_metrics",
        "gauge",
        "timestamp (Unix seconds of the engine's last answer) and iteration_counter (steps since its start)",
        lambda stats: {"timestamp": stats["timestamp"], "iteration_counter": stats["num_steps"]},
        "general_type",
    ),
    _gauge("faser_num_requests_running", "num_running", "Requests that hold a slot"),
    _gauge("faser_num_requests_waiting", "num_waiting", "Requests in the queue"),
    Family(
        "faser_kv_cache_usage_perc", "gauge", "Fraction of KV cache blocks in use, 0 to 1", lambda s: {"": _kv_usage(s)}
    ),
    _gauge(
        "faser_price_tokens_per_second",
        "price_tokens_per_ms",
        "Goodput that the policy price expects and by which it chooses rows to verify; 0 with other policies",
        1e3,
    ),
    Family(
        "faser_doubtful_costs",
        "gauge",
        "1 if the cost table does not fit measured times of this kind of pass, so draft lengths may be chosen badly",
        lambda stats: {kind: stats[f"doubtful_costs_{kind}"] for kind in COST_KINDS},
        "kind",
    ),
    _gauge(
        "faser_synthetic_acceptance",
        "synthetic_acceptance",
        "1 while drafts are accepted at random (synthetic_acceptance): outputs are not the target's",
    ),
    _counter("faser_engine_restarts_total", "num_restarts", "Restarts of the engine process"),
    _counter("faser_prompt_tokens_total", "num_prompt_tokens", "Prompt tokens of requests that have an output token"),
    _counter("faser_generation_tokens_total", "num_output_tokens", "Output tokens committed"),
    _counter("faser_num_preemptions_total", "num_preemptions", "Preemptions of requests that have ended"),
    _counter("faser_prefix_cache_queries_total", "num_prefix_tokens", "Prompt tokens looked up in the KV cache"),
    _counter("faser_prefix_cache_hits_total", "num_prefix_hit_tokens", "Prompt tokens found in the KV cache"),
    Family(
        "faser_spec_disabled",
        "gauge",
        "1 while speculation is off for this reason; requests continue without it and get the same text",
        lambda stats: {reason.value: stats[f"spec_disabled_{reason.value}"] for reason in DisabledReason},
        "reason",
    ),
    Family(
        "faser_spec_fallbacks_total",
        "counter",
        "Times speculation was turned off for this reason",
        lambda stats: {reason.value: stats[f"num_spec_fallbacks_{reason.value}"] for reason in DisabledReason},
        "reason",
    ),
    _counter("faser_spec_decode_num_drafts_total", "num_drafts", "Draft sequences verified, one per request and step"),
    _counter(
        "faser_spec_decode_num_draft_tokens_total",
        "num_draft_tokens",
        "Draft tokens that were tested, or dropped after a rejected one",
    ),
    Family(
        "faser_spec_decode_num_tested_tokens_by_drafter_total",
        "counter",
        "Draft tokens that were tested, by drafter",
        lambda stats: {name.value: stats[f"num_tested_drafts_{name.value}"] for name in DrafterName},
        "drafter",
    ),
    Family(
        "faser_spec_decode_num_accepted_tokens_by_drafter_total",
        "counter",
        "Draft tokens that passed their test, by drafter",
        lambda stats: {name.value: stats[f"num_passed_drafts_{name.value}"] for name in DrafterName},
        "drafter",
    ),
    Family(
        "faser_spec_decode_draft_seconds_by_drafter_total",
        "counter",
        "Seconds spent drafting, by drafter",
        lambda stats: {name.value: stats[_DRAFT_MS[name]] / 1e3 for name in DrafterName},
        "drafter",
    ),
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
        "Accepted draft tokens by position in their draft sequence; 0 is the first",
    ),
    _counter("faser_spec_decode_num_pruned_rows_total", "num_pruned_rows", "Rows dropped inside verification passes"),
    _counter("faser_spec_decode_num_branch_rows_total", "num_branch_rows", "Rows of branches, in addition to drafts"),
    _counter("faser_spec_decode_num_branch_tokens_total", "num_branch_tokens", "Tokens that rows of branches yielded"),
    _by_index(
        "faser_spec_decode_verified_len_total",
        "num_verified_by_len",
        "length",
        "Verification lengths: draft tokens whose rows ran, one value per request and step; 0 is no speculation",
    ),
    _counter("faser_spec_decode_num_rows_total", "num_verified_rows", "Verification rows that ran through all layers"),
    _counter(
        "faser_spec_decode_num_oracle_rows_total",
        "num_oracle_rows",
        "Rows that an oracle would have run, knowing which drafts are accepted",
    ),
    Family(
        "faser_steps_total",
        "counter",
        "Steps by mode, which is how drafting and verification overlap",
        lambda stats: {mode: stats[f"num_steps_{mode}"] for mode in ("serial", "draft_ahead", "ping_pong")},
        "mode",
    ),
    Family(
        "faser_step_seconds_total",
        "counter",
        "Seconds spent in schedule, draft, verify and update; draft and verify may overlap unless the mode is serial",
        lambda stats: {part: stats[f"{part}_ms"] / 1e3 for part in ("schedule", "draft", "verify", "update")},
        "part",
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
        "Mean time per token after the first, one value per successful request",
        "time_per_output_token_s",
    ),
    HistogramFamily(
        "faser_e2e_request_latency_seconds",
        "From arrival to the last token of successful requests",
        "e2e_latency_s",
    ),
    HistogramFamily(
        "nv_llm_input_token_len",
        "Prompt tokens of successful requests",
        "input_token_len",
        (("response_metric_type", "total_input_tokens"),),
    ),
    HistogramFamily(
        "nv_llm_output_token_len",
        "Output tokens of successful requests",
        "output_token_len",
        (("response_metric_type", "total_output_tokens"),),
    ),
)

PREFIX, VLLM_PREFIX = "faser_", "vllm:"

_VLLM_NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    "spec_decode_num_accepted_tokens_per_pos_total",
    *(f"inter_token_latency_seconds_{part}" for part in ("bucket", "sum", "count")),
    *("time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    "request_queue_time_seconds",
)

VLLM_FAMILIES = tuple(replace(f, name=VLLM_PREFIX + n) for n in _VLLM_NAMES for f in FAMILIES if f.name == PREFIX + n)
VLLM_HISTOGRAM_FAMILIES = tuple(
    replace(f, name=VLLM_PREFIX + n) for n in _VLLM_NAMES for f in HISTOGRAM_FAMILIES if f.name == PREFIX + n
)
"""The same metrics under the names that vLLM's dashboards and benchmarks look for."""

SUCCESSES = ("faser_request_success_total", "Successful requests, by finished_reason")
FAILURES = ("faser_request_failures_total", "Requests that were refused or failed, by Triton's status code")
