"""Percentiles, goodput and shares of `faser bench serve`, on outcomes made by hand."""

from __future__ import annotations

import pytest

from faser_trtllm.bench.serve.options import Objectives
from faser_trtllm.bench.serve.outcome import Ending, Outcome
from faser_trtllm.bench.serve.overhead import compare
from faser_trtllm.bench.serve.summary import PERCENTILES, distribution, keeps, summarize_load
from faser_trtllm.bench.serve.workload import ServeJob, cancel_points, fit_lengths
from faser_trtllm.errors import FaserError


def outcome(
    due_s: float, chunks: list[tuple[float, int]], ending: Ending = Ending.COMPLETED, late_s: float = 0.0
) -> Outcome:
    """chunks: (seconds after it was due, tokens)."""
    made = Outcome(due_s=due_s, sent_s=due_s + late_s, ending=ending)
    for after_s, num_tokens in chunks:
        made.add_chunk(due_s + after_s, list(range(num_tokens)))
    made.ended_s = due_s + chunks[-1][0]
    return made


def test_distribution_is_in_ms() -> None:
    found = distribution([i / 1000.0 for i in range(101)])
    assert found is not None
    assert found.percentiles_ms == pytest.approx(PERCENTILES)
    assert (found.count, found.mean_ms, found.max_ms) == (101, pytest.approx(50.0), pytest.approx(100.0))
    assert distribution([]) is None


def test_times_count_from_when_the_request_was_due() -> None:
    late = outcome(10.0, [(0.5, 1), (0.9, 4)], late_s=0.3)
    assert late.late_s == pytest.approx(0.3)
    assert late.ttft_s == pytest.approx(0.5)
    assert late.tpot_s == pytest.approx(0.4 / 4)
    assert late.e2e_s == pytest.approx(0.9)
    assert late.gaps_s() == pytest.approx([0.4])


def test_one_token_has_no_time_per_token_and_an_empty_response_is_no_chunk() -> None:
    single = outcome(0.0, [(0.2, 1), (0.7, 0)])
    assert single.tpot_s is None
    assert len(single.chunk_s) == 1
    assert keeps(single, Objectives(tpot_ms=0.001))


def test_goodput_needs_every_objective() -> None:
    done = outcome(0.0, [(0.1, 1), (0.5, 4)])  # TTFT 100 ms, TPOT 100 ms, end to end 500 ms
    assert keeps(done, Objectives(100.1, 100.1, 500.1))
    for objectives in (Objectives(ttft_ms=99.0), Objectives(tpot_ms=99.0), Objectives(e2e_ms=499.0)):
        assert not keeps(done, objectives)
    done.ending = Ending.FAILED
    assert not keeps(done, Objectives())


def test_summary_counts_every_request_once() -> None:
    outcomes = [
        outcome(0.0, [(0.1, 1), (1.0, 9)]),
        outcome(1.0, [(0.6, 1), (1.0, 9)]),
        outcome(2.0, [(0.1, 2)], Ending.CANCELLED),
        Outcome(due_s=3.0, sent_s=3.0, ended_s=4.0, error="UNAVAILABLE: full"),
        Outcome(due_s=3.5, sent_s=3.5, ended_s=5.0, error="UNAVAILABLE: full"),
    ]
    outcomes[0].num_draft_tokens, outcomes[0].num_accepted_tokens = 10, 6
    outcomes[1].num_draft_tokens, outcomes[1].num_accepted_tokens = 10, 8
    found = summarize_load(outcomes, 55, Objectives(ttft_ms=500.0))
    assert (found.num_completed, found.num_cancelled, found.num_failed) == (2, 1, 2)
    assert found.cancelled_share == pytest.approx(0.2)
    assert found.duration_s == pytest.approx(5.0)
    assert found.output_tokens_per_s == pytest.approx(22 / 5.0)
    assert found.requests_per_s == pytest.approx(2 / 5.0)
    assert found.goodput_requests_per_s == pytest.approx(1 / 5.0)
    assert found.goodput_share == pytest.approx(1 / 4)  # failures count against it, what we cancelled does not
    assert found.acceptance_rate == pytest.approx(0.7)
    assert found.tokens_per_chunk == pytest.approx(22 / 5)
    assert found.errors == {"UNAVAILABLE: full": 2}
    assert found.ttft is not None
    assert found.ttft.count == 2
    assert summarize_load(outcomes, 55, Objectives()).goodput_requests_per_s is None


def test_lengths_fit_the_engine() -> None:
    assert fit_lengths(100, 50, 512) == (100, 50)
    assert fit_lengths(500, 50, 512) == (500, 12)
    assert fit_lengths(9000, 50, 512) == (511, 1)


def test_cancelled_requests_are_as_many_as_the_share_says() -> None:
    points = cancel_points([5] * 200, 0.2, seed=1)
    chosen = [point for point in points if point is not None]
    assert len(chosen) == 40
    assert set(chosen) == {1, 2, 3, 4, 5}
    assert cancel_points([5] * 200, 0.2, seed=1) == points != cancel_points([5] * 200, 0.2, seed=2)
    assert cancel_points([5] * 3, 0.0, seed=1) == [None] * 3


def side(seconds: float, token: int = 7):
    """A run in which every job ends after so many seconds."""

    def run(jobs, concurrency):
        return [outcome(0.0, [(seconds, job.max_tokens)]) for job in jobs] if token == 7 else other(jobs, seconds)

    return run


def other(jobs, seconds):
    answers = [outcome(0.0, [(seconds, job.max_tokens)]) for job in jobs]
    answers[0].token_ids[0] = 99
    return answers


def test_overhead_is_the_median_of_paired_ratios_without_the_first_round() -> None:
    rounds = [[ServeJob((1,), 10), ServeJob((2,), 10)] for _ in range(4)]
    lines: list[str] = []
    report = compare(rounds, 2, side(1.0), side(1.25), None, lines.append)
    assert len(report.rounds) == 3
    assert report.rounds[0][0].tokens_per_s == pytest.approx(20.0)
    assert report.served_share.median == pytest.approx(0.8)
    assert report.overhead == pytest.approx(0.2)
    assert (report.num_different, report.num_compared) == (0, 8)
    assert lines[0].startswith("round 0 (dropped): in process 20 tok/s, served 16 tok/s")
    assert lines[1].startswith("round 1: served")
    assert compare(rounds, 2, side(1.0), side(1.25, token=0), None, lines.append).num_different == 4


def test_a_failed_request_spoils_the_comparison() -> None:
    failed = [Outcome(due_s=0.0, ended_s=1.0, error="UNAVAILABLE: full")]
    with pytest.raises(FaserError, match=r"request 0 of a round failed \(UNAVAILABLE: full\)"):
        compare([[ServeJob((1,), 10)]], 1, side(1.0), lambda jobs, concurrency: failed, None, lambda line: None)
