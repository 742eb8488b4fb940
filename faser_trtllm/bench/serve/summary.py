"""Summarises the outcomes of a run: percentiles, throughput, goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faser_trtllm.bench.serve.options import Objectives
from faser_trtllm.bench.serve.outcome import Ending, Outcome

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Distribution:
    """In ms. percentiles: those in PERCENTILES, in order, linearly interpolated."""

    count: int
    mean_ms: float
    max_ms: float
    percentiles_ms: tuple[float, ...]


@dataclass(frozen=True)
class LoadSummary:
    """An open-loop run.

    duration_s: from the first due time to the end of the last request. Latencies cover completed requests, chunk gaps
    all requests. goodput_requests_per_s: completed requests that meet every objective; goodput_share: their share of
    the requests that the bench did not cancel; None without objectives. late: how late the bench itself sent.
    acceptance_rate: accepted / drafted tokens, None if nothing was drafted. errors: messages and counts. num_synthetic:
    requests whose drafts were accepted by synthetic_acceptance.
    """

    num_requests: int
    num_completed: int
    num_cancelled: int
    num_failed: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    num_input_tokens: int
    num_output_tokens: int
    tokens_per_chunk: float | None
    acceptance_rate: float | None
    ttft: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    chunk_gap: Distribution | None
    late: Distribution | None
    goodput_requests_per_s: float | None
    goodput_share: float | None
    errors: dict[str, int]
    num_synthetic: int = 0

    @property
    def cancelled_share(self) -> float:
        return self.num_cancelled / self.num_requests


def distribution(seconds: Sequence[float]) -> Distribution | None:
    """None for an empty sample."""
    if not seconds:
        return None
    ms = 1e3 * np.array(seconds)
    return Distribution(len(ms), float(ms.mean()), float(ms.max()), tuple(np.percentile(ms, PERCENTILES).tolist()))


def keeps(outcome: Outcome, objectives: Objectives) -> bool:
    """Whether a completed request meets every objective. With a single token, time per token is met trivially."""
    measured = ((objectives.ttft_ms, outcome.ttft_s), (objectives.tpot_ms, outcome.tpot_s))
    return (
        outcome.ending is Ending.COMPLETED
        and all(bound is None or value is None or 1e3 * value <= bound for bound, value in measured)
        and (objectives.e2e_ms is None or 1e3 * outcome.e2e_s <= objectives.e2e_ms)
    )


def summarize_load(outcomes: Sequence[Outcome], num_input_tokens: int, objectives: Objectives) -> LoadSummary:
    """Summarise a run; outcomes must not be empty. num_input_tokens: total over all requests."""
    endings = Counter(outcome.ending for outcome in outcomes)
    completed = [outcome for outcome in outcomes if outcome.ending is Ending.COMPLETED]
    duration_s = max(o.ended_s for o in outcomes) - min(o.due_s for o in outcomes)
    num_tokens = sum(o.num_tokens for o in outcomes)
    num_chunks = sum(len(o.chunk_s) for o in outcomes)
    drafts = sum(o.num_draft_tokens or 0 for o in outcomes)
    num_uncancelled = len(outcomes) - endings[Ending.CANCELLED]
    num_good = sum(keeps(o, objectives) for o in completed) if objectives.any_given else None
    return LoadSummary(
        num_requests=len(outcomes),
        num_completed=endings[Ending.COMPLETED],
        num_cancelled=endings[Ending.CANCELLED],
        num_failed=endings[Ending.FAILED],
        duration_s=duration_s,
        requests_per_s=len(completed) / duration_s,
        output_tokens_per_s=num_tokens / duration_s,
        num_input_tokens=num_input_tokens,
        num_output_tokens=num_tokens,
        tokens_per_chunk=num_tokens / num_chunks if num_chunks else None,
        acceptance_rate=sum(o.num_accepted_tokens or 0 for o in outcomes) / drafts if drafts else None,
        ttft=distribution([o.ttft_s for o in completed if o.ttft_s is not None]),
        tpot=distribution([o.tpot_s for o in completed if o.tpot_s is not None]),
        e2e=distribution([o.e2e_s for o in completed]),
        chunk_gap=distribution([gap for o in outcomes for gap in o.gaps_s()]),
        late=distribution([o.late_s for o in outcomes]),
        goodput_requests_per_s=None if num_good is None else num_good / duration_s,
        goodput_share=num_good / num_uncancelled if num_good is not None and num_uncancelled else None,
        errors=dict(Counter(o.error for o in outcomes if o.error is not None)),
        num_synthetic=sum(o.is_synthetic for o in outcomes),
    )
