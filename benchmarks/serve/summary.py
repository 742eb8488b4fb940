"""Summarize the outcomes of a run: latencies, throughput, goodput, acceptance by category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.serve.acceptance import Acceptance, pooled
from benchmarks.serve.outcome import Outcome

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Distribution:
    """A distribution of times. percentiles_ms: those in PERCENTILES, linearly interpolated."""

    count: int
    mean_ms: float
    max_ms: float
    percentiles_ms: tuple[float, ...]


@dataclass(frozen=True)
class LoadSummary:
    """Summary of a run. Latencies cover completed requests.

    duration_s: from the first due time to the end of the last request.
    itl: gaps between the pieces of answers. late: delays by the bench itself.
    good: completed requests within every bound, None without bounds. errors: counts by message.
    num_uncounted: completed requests whose tokens the server did not count.
    num_synthetic: requests with synthetic_acceptance. acceptance: by category, of num_recorded requests with a record.
    """

    num_requests: int
    num_completed: int
    duration_s: float
    num_input_tokens: int
    num_output_tokens: int
    num_pieces: int
    num_uncounted: int
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None
    late: Distribution | None
    good: int | None
    errors: dict[str, int]
    num_synthetic: int
    acceptance: dict[str, Acceptance]
    num_recorded: int

    @property
    def num_failed(self) -> int:
        return self.num_requests - self.num_completed

    def as_dict(self) -> dict[str, Any]:
        """Return a dict with the names of results of `vllm bench serve`, if it has them."""
        per_s = 1.0 / self.duration_s
        found: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.num_completed,
            "failed": self.num_failed,
            "total_input_tokens": self.num_input_tokens,
            "total_output_tokens": self.num_output_tokens,
            "request_throughput": self.num_completed * per_s,
            "request_goodput": None if self.good is None else self.good * per_s,
            "output_throughput": self.num_output_tokens * per_s,
            "total_token_throughput": (self.num_input_tokens + self.num_output_tokens) * per_s,
        }
        for name in ("ttft", "tpot", "itl", "e2el", "late"):
            distribution = getattr(self, name)
            if distribution is not None:
                found[f"mean_{name}_ms"] = distribution.mean_ms
                found[f"median_{name}_ms"] = distribution.percentiles_ms[0]
                for percent, value in zip(PERCENTILES, distribution.percentiles_ms, strict=True):
                    found[f"p{percent}_{name}_ms"] = value
                found[f"max_{name}_ms"] = distribution.max_ms
        return found | {
            "tokens_per_piece": self.num_output_tokens / self.num_pieces if self.num_pieces else None,
            "completed_without_usage": self.num_uncounted,
            "completed_with_acceptance": self.num_recorded,
            "synthetic": self.num_synthetic,
            "acceptance_by_category": {name: value.as_dict() for name, value in self.acceptance.items()},
            "errors": self.errors,
        }


def distribution(seconds: Sequence[float]) -> Distribution | None:
    """Return the distribution, None for an empty sample."""
    if not seconds:
        return None
    ms = 1e3 * np.array(seconds)
    return Distribution(len(ms), float(ms.mean()), float(ms.max()), tuple(np.percentile(ms, PERCENTILES).tolist()))


def keeps(outcome: Outcome, bounds_ms: Mapping[str, float]) -> bool:
    """Return True if a request completed within every bound. With a single token, time per token is met trivially."""
    measured = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2el": outcome.e2e_s}
    values = [(bound, measured[name]) for name, bound in bounds_ms.items()]
    return outcome.error is None and all(value is None or 1e3 * value <= bound for bound, value in values)


def summarize_load(outcomes: Sequence[Outcome], bounds_ms: Mapping[str, float]) -> LoadSummary:
    """Summarize a run; outcomes must not be empty."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    records: dict[str, list[Acceptance]] = {}
    for outcome in done:
        if outcome.acceptance is not None:
            records.setdefault(outcome.category, []).append(outcome.acceptance)
    return LoadSummary(
        num_requests=len(outcomes),
        num_completed=len(done),
        duration_s=max(1e-9, max(o.ended_s for o in outcomes) - min(o.due_s for o in outcomes)),
        num_input_tokens=sum(o.num_prompt_tokens or 0 for o in done),
        num_output_tokens=sum(o.num_tokens or 0 for o in done),
        num_pieces=sum(len(o.chunk_s) for o in done if o.num_tokens is not None),
        num_uncounted=sum(o.num_tokens is None for o in done),
        ttft=distribution([o.ttft_s for o in done if o.ttft_s is not None]),
        tpot=distribution([o.tpot_s for o in done if o.tpot_s is not None]),
        itl=distribution([gap for o in done for gap in o.gaps_s()]),
        e2el=distribution([o.e2e_s for o in done]),
        late=distribution([o.late_s for o in outcomes]),
        good=sum(keeps(o, bounds_ms) for o in done) if bounds_ms else None,
        errors=dict(Counter(o.error for o in outcomes if o.error is not None).most_common()),
        num_synthetic=sum(o.is_synthetic for o in outcomes),
        acceptance={name: pooled(found) for name, found in sorted(records.items())},
        num_recorded=sum(map(len, records.values())),
    )
