"""Latencies, goodput and counts of `faser bench serve`, on outcomes made by hand."""

from __future__ import annotations

import pytest

from benchmarks.serve.acceptance import Acceptance
from benchmarks.serve.outcome import Outcome
from benchmarks.serve.summary import PERCENTILES, distribution, keeps, summarize_load


def outcome(due_s: float, pieces_s: list[float], num_tokens: int | None, late_s: float = 0.0) -> Outcome:
    """pieces_s: seconds after it was due."""
    made = Outcome(due_s, sent_s=due_s + late_s, num_tokens=num_tokens, num_prompt_tokens=5)
    made.chunk_s = [due_s + after_s for after_s in pieces_s]
    made.ended_s = due_s + (pieces_s or [0.0])[-1]
    return made


def test_distribution_is_in_ms() -> None:
    found = distribution([i / 1000.0 for i in range(101)])
    assert found is not None
    assert found.percentiles_ms == pytest.approx(PERCENTILES)
    assert (found.count, found.mean_ms, found.max_ms) == (101, pytest.approx(50.0), pytest.approx(100.0))
    assert distribution([]) is None


def test_times_count_from_when_the_request_was_due() -> None:
    late = outcome(10.0, [0.5, 0.9], 5, late_s=0.3)
    assert late.late_s == pytest.approx(0.3)
    assert late.ttft_s == pytest.approx(0.5)
    assert late.tpot_s == pytest.approx(0.4 / 4)
    assert late.e2e_s == pytest.approx(0.9)
    assert late.gaps_s() == pytest.approx([0.4])


@pytest.mark.parametrize(("pieces", "num_tokens"), [([0.2], 1), ([], 0), ([0.1, 0.2], None)])
def test_no_time_per_token_without_two_counted_tokens(pieces: list[float], num_tokens: int | None) -> None:
    assert outcome(0.0, pieces, num_tokens).tpot_s is None


def test_goodput_needs_every_bound() -> None:
    done = outcome(0.0, [0.1, 0.5], 5)  # TTFT 100 ms, TPOT 100 ms, end to end 500 ms
    assert keeps(done, {"ttft": 100.1, "tpot": 100.1, "e2el": 500.1})
    for bounds in ({"ttft": 99.0}, {"tpot": 99.0}, {"e2el": 499.0}):
        assert not keeps(done, bounds)
    done.error = "HTTP 500"
    assert not keeps(done, {})


def test_summary_counts_every_request_once() -> None:
    outcomes = [outcome(0.0, [0.1, 1.0], 10), outcome(1.0, [0.6, 1.0], 10), outcome(1.5, [0.2], None)]
    outcomes += [Outcome(3.0, sent_s=3.0, ended_s=4.0 + i, error="HTTP 503: full") for i in range(2)]
    outcomes[0].acceptance, outcomes[0].category = Acceptance(4, 12, 6, {1: 2, 2: 2}), "math"
    outcomes[1].acceptance, outcomes[1].category = Acceptance(2, 6, 2, {1: 2}), "qa"
    found = summarize_load(outcomes, {"ttft": 500.0})
    assert (found.num_requests, found.num_completed, found.num_failed) == (5, 3, 2)
    assert found.duration_s == pytest.approx(5.0)
    assert found.ttft is not None
    assert found.ttft.count == 3
    assert found.tpot is not None
    assert found.tpot.count == 2
    assert found.late is not None
    assert found.late.count == 5
    assert found.good == 2
    assert found.errors == {"HTTP 503: full": 2}
    assert {name: value.length for name, value in found.acceptance.items()} == {"math": 2.5, "qa": 2.0}
    result = found.as_dict()
    assert (result["completed"], result["failed"], result["completed_without_usage"]) == (3, 2, 1)
    assert result["request_throughput"] == pytest.approx(3 / 5)
    assert result["output_throughput"] == pytest.approx(20 / 5)
    assert result["total_token_throughput"] == pytest.approx(35 / 5)
    assert result["request_goodput"] == pytest.approx(2 / 5)
    assert result["tokens_per_piece"] == pytest.approx(20 / 4)
    assert result["median_tpot_ms"] == pytest.approx((100.0 + 400.0 / 9) / 2)
    assert result["acceptance_by_category"]["math"]["num_spec_steps"] == 4
    assert summarize_load(outcomes, {}).good is None
