"""Requests and arrivals of the policy bench."""

import numpy as np
import pytest

from benchmarks.policies.workload import bursty, bursty_rates, closed_loop, draw_jobs

PROMPTS = [(1, 2, 3), (4, 5, 6)]


def jobs(num_jobs: int = 40, seed: int = 3, sampled_share: float = 0.5):
    return draw_jobs(
        PROMPTS, num_jobs, min_tokens=32, max_tokens=160, temperature=0.8, sampled_share=sampled_share, seed=seed
    )


def test_outputs_of_every_job_can_be_compared() -> None:
    for job in jobs():
        assert 32 <= job.params.max_tokens <= 160
        assert job.params.is_greedy or job.params.seed is not None
        job.params.validate(100)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_share_of_sampled_jobs(share: float) -> None:
    assert sum(not job.params.is_greedy for job in jobs(sampled_share=share)) == 40 * share


def test_same_seed_same_jobs() -> None:
    assert jobs(seed=1) == jobs(seed=1) != jobs(seed=2)
    assert bursty(jobs(), 10.0, 35.0, 1) == bursty(jobs(), 10.0, 35.0, 1) != bursty(jobs(), 10.0, 35.0, 2)


def test_rates_swing_and_bring_all_jobs() -> None:
    rates, durations = bursty_rates(200, 70.0, 35.0)
    assert max(rates) == pytest.approx(70.0)
    assert min(rates) == pytest.approx(2.0)
    assert sum(np.multiply(rates, durations)) == pytest.approx(200)


def test_arrivals_follow_the_rates() -> None:
    many = bursty(jobs(4000), 100.0, 35.0, 0)
    arrivals = np.array([job.arrival_s for job in many.jobs])
    assert (np.diff(arrivals) >= 0).all()
    rates, durations = bursty_rates(4000, 100.0, 35.0)
    edges = np.concatenate([[0.0], np.cumsum(durations)])
    assert arrivals[-1] <= edges[-1]
    for rate, duration, first, last in zip(rates, durations, edges[:-1], edges[1:], strict=True):
        seen = ((arrivals >= first) & (arrivals < last)).sum()
        expected = rate * duration
        assert abs(seen - expected) < 5 * np.sqrt(expected) + 5


def test_closed_loop_has_no_arrivals() -> None:
    workload = closed_loop(jobs(6), 2)
    assert workload.concurrency == 2
    assert workload.num_tokens == sum(job.params.max_tokens for job in workload.jobs)
    assert all(job.arrival_s == 0.0 for job in workload.jobs)
