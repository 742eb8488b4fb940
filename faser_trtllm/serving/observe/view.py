"""The numbers that `faser top` shows, computed from two scrapes of /metrics."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser_trtllm.errors import InvalidArgumentError, UnavailableError
from faser_trtllm.serving.observe.scrape import Scrape, parse_metrics, quantile

_SPEC = "faser_spec_decode"
_MAX_BYTES = 16 << 20
LATENCIES = {
    "ttft": "faser_time_to_first_token_seconds",
    "inter_token": "faser_inter_token_latency_seconds",
    "queue": "faser_request_queue_time_seconds",
    "e2e": "faser_e2e_request_latency_seconds",
}


@dataclass(frozen=True)
class View:
    """A server's numbers over one window of time.

    Fractions are 0 to 1 and times in seconds. A value is None if the window has no traffic to compute it from. Rates
    and steps refer to the window; acceptance, cache hits and latencies do too, or to the time since the server's start
    if is_since_start.
    """

    engine: Mapping[str, Any]  # has is_synthetic and doubtful_costs (kinds of passes) only if they apply
    requests: Mapping[str, float | None]
    throughput: Mapping[str, float | None]
    steps: Mapping[str, Any]
    speculation: Mapping[str, Any]
    cache: Mapping[str, float | None]
    latency_s: Mapping[str, Mapping[str, float | None]]
    window_s: float
    is_since_start: bool


def fetch(url: str, timeout_s: float = 5.0) -> Scrape:
    """Scrape a server; raise UnavailableError with the reason if it has no metrics of faser_trtllm."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            text = answer.read(_MAX_BYTES).decode(errors="replace")
    except ValueError as error:
        raise InvalidArgumentError(f"url is {url!r}; it must look like http://127.0.0.1:8002/metrics") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(error, http.client.HTTPException):
            reason = "what listens there does not speak HTTP/1.1"
        raise UnavailableError(
            f"no metrics at {url} ({reason}); start `faser serve`, or name its metrics port with --url"
        ) from error
    scrape = parse_metrics(text)
    if "faser_engine_ready" not in scrape.samples:
        raise UnavailableError(
            f"{url} has no metrics of faser_trtllm; name the metrics port of `faser serve` with --url"
        )
    return scrape


def make_view(now: Scrape, before: Scrape | None = None) -> View:
    """Compute the view between two scrapes of a server; without the older one, rates are None."""
    window = _Window(now, before)
    since_start = before is None or window.delta("faser_generation_tokens_total") <= 0.0
    counts = _Window(now, None) if since_start else window
    blocks = now.by_label("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type")
    kinds = now.by_label("nv_trt_llm_request_metrics", "request_type")
    drafts = counts.delta(f"{_SPEC}_num_drafts_total")
    accepted = counts.delta(f"{_SPEC}_num_accepted_tokens_total")
    positions = counts.deltas(f"{_SPEC}_num_accepted_tokens_per_pos_total", "position")
    lengths = counts.deltas(f"{_SPEC}_verified_len_total", "length")
    tested, passed = (
        counts.deltas(f"{_SPEC}_num_{which}_tokens_by_drafter_total", "drafter") for which in ("tested", "accepted")
    )
    draft_s = counts.deltas(f"{_SPEC}_draft_seconds_by_drafter_total", "drafter")
    tokens = counts.delta("faser_generation_tokens_total")
    modes = window.deltas("faser_steps_total", "mode")
    doubtful = [kind for kind, is_so in now.by_label("faser_doubtful_costs", "kind").items() if is_so > 0.0]
    num_steps = sum(modes.values())
    return View(
        engine={
            "is_ready": now.get("faser_engine_ready") > 0.0,
            "num_restarts": now.get("faser_engine_restarts_total"),
            **({"is_synthetic": True} if now.get("faser_synthetic_acceptance") > 0.0 else {}),
            **({"doubtful_costs": doubtful} if doubtful else {}),
        },
        requests={
            "running": now.get("faser_num_requests_running"),
            "max": kinds.get("max", 0.0),
            "context": kinds.get("context", 0.0),
            "waiting": now.get("faser_num_requests_waiting"),
            "ended_per_s": window.rate("faser_request_success_total"),
            "failed_per_s": window.rate("faser_request_failures_total"),
        },
        throughput={
            "generation_tokens_per_s": window.rate("faser_generation_tokens_total"),
            "prompt_tokens_per_s": window.rate("faser_prompt_tokens_total"),
            "steps_per_s": None if window.seconds <= 0.0 else num_steps / window.seconds,
        },
        steps={
            "mode": {mode: _share(count, num_steps) for mode, count in modes.items()},
            "busy": {
                part: _share(seconds, window.seconds)
                for part, seconds in window.deltas("faser_step_seconds_total", "part").items()
            },
        },
        speculation={
            "acceptance_rate": _share(accepted, counts.delta(f"{_SPEC}_num_draft_tokens_total")),
            "mean_acceptance_length": None if drafts <= 0.0 else 1.0 + accepted / drafts,
            "oracle_fraction": _share(
                counts.delta(f"{_SPEC}_num_oracle_rows_total"), counts.delta(f"{_SPEC}_num_rows_total")
            ),
            "draft_tokens_per_s": window.rate(f"{_SPEC}_num_draft_tokens_total"),
            "pruned_rows_per_s": window.rate(f"{_SPEC}_num_pruned_rows_total"),
            "price_tokens_per_s": now.get("faser_price_tokens_per_second"),
            "drafters": {
                name: {
                    "acceptance_rate": _share(passed.get(name, 0.0), count),
                    "share": _share(passed.get(name, 0.0), tokens),
                    "ms_per_accepted_token": _share(1e3 * draft_s.get(name, 0.0), passed.get(name, 0.0)),
                }
                for name, count in tested.items()
                if count > 0.0
            },
            "accepted_by_position": [_share(positions[place], drafts) for place in _in_order(positions)],
            "verified_by_length": [_share(lengths[place], sum(lengths.values())) for place in _in_order(lengths)],
        },
        cache={
            "usage": now.get("faser_kv_cache_usage_perc"),
            "blocks_used": blocks.get("used", 0.0),
            "blocks_max": blocks.get("max", 0.0),
            "tokens_per_block": blocks.get("tokens_per", 0.0),
            "hit_rate": _share(
                counts.delta("faser_prefix_cache_hits_total"), counts.delta("faser_prefix_cache_queries_total")
            ),
        },
        latency_s={
            name: {f"p{p}": quantile(p / 100, counts.buckets(metric)) for p in (50, 90, 99)}
            for name, metric in LATENCIES.items()
        },
        window_s=window.seconds,
        is_since_start=since_start,
    )


class _Window:
    """Differences of counters between two scrapes, or since the server's start."""

    def __init__(self, now: Scrape, before: Scrape | None) -> None:
        self._now, self._before = now, before
        self.seconds = 0.0 if before is None else max(0.0, _timestamp(now) - _timestamp(before))

    def delta(self, name: str) -> float:
        return self._since(self._now.get(name), 0.0 if self._before is None else self._before.get(name))

    def rate(self, name: str) -> float | None:
        return None if self.seconds <= 0.0 else self.delta(name) / self.seconds

    def deltas(self, name: str, label: str) -> dict[str, float]:
        before = {} if self._before is None else self._before.by_label(name, label)
        now = self._now.by_label(name, label)
        return {key: self._since(value, before.get(key, 0.0)) for key, value in now.items()}

    def buckets(self, name: str) -> dict[float, float]:
        before = {} if self._before is None else self._before.buckets(name)
        now = self._now.buckets(name)
        return {bound: self._since(count, before.get(bound, 0.0)) for bound, count in now.items()}

    def _since(self, now: float, before: float) -> float:
        return now - before if now >= before else now


def _timestamp(scrape: Scrape) -> float:
    """Return the Unix time at which the engine counted, which is steadier than the time of the scrape."""
    return scrape.get("nv_trt_llm_general_metrics", general_type="timestamp")


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None


def _in_order(values: Mapping[str, float]) -> list[str]:
    return sorted(values, key=int)
