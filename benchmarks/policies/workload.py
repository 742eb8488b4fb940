"""The requests of a run: real prompts, mixed lengths and ways of sampling, and when they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from faser_trtllm.core.sampling_params import SamplingParams

# Of a closed loop, whose rate is of the time up to the first request that nothing follows. With one per stream, whoever
# drafts while all prompts run ends it sooner; with two, half of the requests are the start.
JOBS_PER_STREAM = 4

# A bursty trace in units of its highest rate: calm, ramps and bursts; lowest and highest are `swing` apart.
_SHAPE = (0.0, 0.15, 1.0, 0.4, 0.05, 0.0, 0.6, 1.0, 0.2, 0.0)
_JOBS_SHARE_OF_CALM = 0.02  # so many of the jobs arrive in a segment of the lowest rate


@dataclass(frozen=True)
class Job:
    """One request. arrival_s: seconds after the start; 0 in a closed loop."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """concurrency: requests in flight in a closed loop; None: they arrive by their arrival_s."""

    name: str
    jobs: tuple[Job, ...]
    concurrency: int | None

    @property
    def num_tokens(self) -> int:
        """Output tokens of all jobs: end ids are ignored, so this many come out."""
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
    """Jobs over the prompts in turn; a share of them is sampled, each with a seed, so that outputs can be compared."""
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
    """Poisson arrivals with piecewise constant rates between peak_rate / swing and peak_rate (jobs per second)."""
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
    """Rates (jobs per second) and durations (s) of the segments; together num_jobs jobs are expected."""
    low = peak_rate / swing
    rates = [low + (peak_rate - low) * level for level in _SHAPE]
    # Calm segments would last for ever if they had to bring as many jobs as bursts: each segment of them brings few.
    weights = [_JOBS_SHARE_OF_CALM if level == 0.0 else level for level in _SHAPE]
    total = sum(weights)
    return rates, [num_jobs * weight / total / rate for weight, rate in zip(weights, rates, strict=True)]
