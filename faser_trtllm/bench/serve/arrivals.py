"""Arrival times and lengths of requests in an open loop: Poisson, bursty, or from a trace."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import InvalidArgumentError
from faser_trtllm.planner.load.trace import read_trace


@dataclass(frozen=True)
class Arrival:
    """arrival_s: seconds from the start of the run. Lengths in tokens; None: use the options."""

    arrival_s: float
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None


def poisson(num_requests: int, request_rate: float, seed: int) -> tuple[Arrival, ...]:
    """Independent arrivals, request_rate per second."""
    return gamma(num_requests, request_rate, 1.0, seed)


def gamma(num_requests: int, request_rate: float, burstiness: float, seed: int) -> tuple[Arrival, ...]:
    """Gamma-distributed gaps of mean 1 / request_rate; a burstiness below 1 makes them bursty, 1 is Poisson.

    burstiness is the shape parameter, as in vLLM's benchmark: the gaps have a coefficient of variation of burstiness **
    -0.5.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (request_rate * burstiness), num_requests)
    return _at(np.cumsum(gaps) - (gaps[0] if num_requests else 0.0))


def square_bursts(
    num_requests: int, request_rate: float, peak_ratio: float, period_s: float, seed: int
) -> tuple[Arrival, ...]:
    """Poisson arrivals whose rate is peak_ratio times higher in every other half period; request_rate is the mean."""
    low = 2.0 * request_rate / (1.0 + peak_ratio)
    unit = np.cumsum(np.random.default_rng(seed).exponential(1.0, num_requests))
    # Unit-rate arrivals mapped through the inverse cumulative rate: one period has request_rate x period_s of them.
    per_period = request_rate * period_s
    num_periods = math.floor(unit[-1] / per_period) + 1 if num_requests else 0
    edges_s = np.arange(2 * num_periods + 1) * period_s / 2
    steps = np.tile([low * peak_ratio * period_s / 2, low * period_s / 2], num_periods)
    edges = np.concatenate([[0.0], np.cumsum(steps)])
    return _at(np.interp(unit, edges, edges_s))


def trace_arrivals(path: Path, num_requests: int | None = None, time_scale: float = 1.0) -> tuple[Arrival, ...]:
    """Arrivals of a trace, sorted by time, the first at 0; gaps are multiplied by time_scale.

    num_requests: maximum number to read. InvalidArgumentError for a file without arrivals, or with requests of nothing.
    """
    rows = sorted(itertools.islice(read_trace(path), num_requests), key=lambda row: row.at_s)
    if not rows:
        raise InvalidArgumentError(f"trace {path.name} has no arrivals; add at least one line after the header")
    for row in rows:
        for name, tokens in (("input", row.num_input_tokens), ("output", row.num_output_tokens)):
            if tokens == 0:
                raise InvalidArgumentError(f"{row.where}: the {name} is 0 tokens long, it must be 1 or more")
    first_s = rows[0].at_s
    return tuple(Arrival((r.at_s - first_s) * time_scale, r.num_input_tokens, r.num_output_tokens) for r in rows)


def _at(times_s: npt.NDArray[np.float64]) -> tuple[Arrival, ...]:
    return tuple(Arrival(float(time_s)) for time_s in times_s)
