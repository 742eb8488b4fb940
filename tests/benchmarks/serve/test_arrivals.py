"""When requests of `faser bench serve` arrive."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.serve.arrivals import arrival_times


def variation(times: list[float]) -> float:
    """Standard deviation of the gaps over their mean."""
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


def test_poisson_has_the_rate_and_exponential_gaps() -> None:
    times = arrival_times(20_000, 50.0, 1.0, seed=0)
    assert times[0] == 0.0
    assert len(times) / times[-1] == pytest.approx(50.0, rel=0.03)
    assert np.mean(np.diff(times) > np.log(2) / 50.0) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_keep_the_rate_and_vary_as_burstiness_says(burstiness: float) -> None:
    times = arrival_times(40_000, 10.0, burstiness, seed=1)
    assert len(times) / times[-1] == pytest.approx(10.0, rel=0.05)
    assert variation(times) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_seed_decides_and_none_or_one_request_is_fine() -> None:
    assert arrival_times(50, 5.0, 1.0, 3) == arrival_times(50, 5.0, 1.0, 3) != arrival_times(50, 5.0, 1.0, 4)
    assert arrival_times(1, 5.0, 1.0, 0) == [0.0]
    assert arrival_times(0, 5.0, 1.0, 0) == []
    assert set(arrival_times(9, math.inf, 1.0, 0)) == {0.0}
