"""The requests of a run: real prompts, mixed lengths and ways of sampling, and arrival times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faser_trtllm.core.sampling_params import SamplingParams

# A closed loop's rate ends with the first request that has no successor. With few jobs per stream the start, where all
# prompts run, would count too much.
JOBS_PER_STREAM = 4

# A bursty trace in units of its highest rate, with calm segments, ramps and bursts.
_SHAPE = (0.0, 0.15, 1.0, 0.4, 0.05, 0.0, 0.6, 1.0, 0.2, 0.0)
_JOBS_SHARE_OF_CALM = 0.02  # share of the jobs in a segment of the lowest rate


@dataclass(frozen=True)
class Job:
    """One request. arrival_s: seconds after the start; 0 in a closed loop."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """A workload. concurrency: running requests of a closed loop; None: requests arrive at arrival_s."""

    name: str
    jobs: tuple[Job, ...]
    concurrency: int | None

    @property
    def num_tokens(self) -> int:
        """Output tokens of all jobs, which ignore end ids."""
        return sum(job.params.max_tokens for job in self.jobs)


def draw_jobs(
    prompts: Sequence[tuple[int, ...]],
    num_jobs: int,
    *,
    min_tokens: int,
    max_tokens: int,
    temperature: float,
    sampled_share: float,
    seed: int,
) -> tuple[Job, ...]:
    """Return jobs with the prompts in turn; a share is sampled, with seeds, so that outputs can be compared."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(min_tokens, max_tokens + 1, num_jobs)
    sampled = (np.arange(num_jobs) * sampled_share) % 1.0 + sampled_share >= 1.0
    seeds = rng.integers(0, 2**32, num_jobs)
    return tuple(
        Job(
            prompts[i % len(prompts)],
            SamplingParams(
                max_tokens=int(lengths[i]),
                temperature=temperature if sampled[i] else 0.0,
                seed=int(seeds[i]) if sampled[i] else None,
            ),
        )
        for i in range(num_jobs)
    )


def closed_loop(jobs: tuple[Job, ...], concurrency: int) -> Workload:
    return Workload(f"concurrency {concurrency}", jobs, concurrency)


def bursty(jobs: tuple[Job, ...], peak_rate: float, swing: float, seed: int) -> Workload:
    """Return Poisson arrivals with piecewise constant rates from peak_rate / swing to peak_rate (jobs per second)."""
    rates, durations = bursty_rates(len(jobs), peak_rate, swing)
    rng = np.random.default_rng(seed)
    # Unit-rate arrivals, scaled to the expected number of jobs and mapped through the inverse of the summed rate.
    unit = np.cumsum(rng.exponential(1.0, len(jobs)))
    unit *= len(jobs) / (unit[-1] + 1.0)
    edges_s = np.concatenate([[0.0], np.cumsum(durations)])
    edges_jobs = np.concatenate([[0.0], np.cumsum(np.multiply(rates, durations))])
    arrivals = np.interp(unit, edges_jobs, edges_s)
    return Workload(
        "bursty",
        tuple(Job(job.prompt, job.params, float(t)) for job, t in zip(jobs, arrivals, strict=True)),
        None,
    )


def bursty_rates(num_jobs: int, peak_rate: float, swing: float) -> tuple[list[float], list[float]]:
    """Return rates (jobs per second) and durations (s) of segments with num_jobs expected jobs in all."""
    low = peak_rate / swing
    rates = [low + (peak_rate - low) * level for level in _SHAPE]
    # Calm segments have few jobs each, since they would last too long with as many as bursts.
    weights = [_JOBS_SHARE_OF_CALM if level == 0.0 else level for level in _SHAPE]
    total = sum(weights)
    return rates, [num_jobs * weight / total / rate for weight, rate in zip(weights, rates, strict=True)]
