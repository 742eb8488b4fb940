"""When the requests of an open loop arrive."""

from __future__ import annotations

import numpy as np


def arrival_times(num_requests: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Return arrival times in seconds, the first at 0; all at 0 if request_rate is infinite.

    Gaps are Gamma-distributed with mean 1 / request_rate and shape burstiness, as in vLLM's benchmark: their
    coefficient of variation is burstiness ** -0.5, and 1 is a Poisson process.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (request_rate * burstiness), num_requests)
    times: list[float] = (np.cumsum(gaps) - (gaps[0] if num_requests else 0.0)).tolist()
    return times
