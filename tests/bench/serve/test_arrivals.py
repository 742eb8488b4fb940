"""When requests of `faser bench serve` arrive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.bench.serve.arrivals import Arrival, gamma, poisson, square_bursts, trace_arrivals
from faser_trtllm.errors import InvalidArgumentError


def times(arrivals: tuple[Arrival, ...]) -> np.ndarray:
    return np.array([arrival.arrival_s for arrival in arrivals])


def variation(arrivals: tuple[Arrival, ...]) -> float:
    """Standard deviation of the gaps over their mean."""
    gaps = np.diff(times(arrivals))
    return float(gaps.std() / gaps.mean())


def test_poisson_has_the_rate_and_exponential_gaps() -> None:
    arrivals = poisson(20_000, 50.0, seed=0)
    assert times(arrivals)[0] == 0.0
    assert len(arrivals) / times(arrivals)[-1] == pytest.approx(50.0, rel=0.03)
    assert variation(arrivals) == pytest.approx(1.0, abs=0.03)
    gaps = np.diff(times(arrivals))
    assert np.mean(gaps > np.log(2) / 50.0) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_keeps_the_rate_and_varies_as_burstiness_says(burstiness: float) -> None:
    arrivals = gamma(40_000, 10.0, burstiness, seed=1)
    assert len(arrivals) / times(arrivals)[-1] == pytest.approx(10.0, rel=0.05)
    assert variation(arrivals) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_square_bursts_have_two_rates_and_their_mean() -> None:
    arrivals = square_bursts(40_000, 20.0, peak_ratio=8.0, period_s=10.0, seed=2)
    seconds = times(arrivals)
    assert np.all(np.diff(seconds) >= 0.0)
    assert len(arrivals) / seconds[-1] == pytest.approx(20.0, rel=0.03)
    is_high = seconds % 10.0 < 5.0
    assert is_high.sum() / (~is_high).sum() == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize("draw", [lambda n, s: poisson(n, 5.0, s), lambda n, s: square_bursts(n, 5.0, 3.0, 2.0, s)])
def test_a_seed_decides_and_none_or_one_request_is_fine(draw) -> None:
    assert draw(50, 3) == draw(50, 3) != draw(50, 4)
    assert len(draw(1, 0)) == 1
    assert draw(0, 0) == ()


def write(directory: Path, text: str) -> Path:
    (directory / "trace.csv").write_text(text)
    return directory / "trace.csv"


def test_a_trace_is_sorted_scaled_and_starts_at_zero(tmp_path: Path) -> None:
    path = write(tmp_path, "num_output_tokens,arrival_s,num_input_tokens\n7,12.5,30\n8,10,40\n9,11,50\n")
    assert trace_arrivals(path) == (Arrival(0.0, 40, 8), Arrival(1.0, 50, 9), Arrival(2.5, 30, 7))
    assert [a.arrival_s for a in trace_arrivals(path, time_scale=0.5)] == [0.0, 0.5, 1.25]
    assert trace_arrivals(path, num_requests=1) == (Arrival(0.0, 30, 7),)
    assert trace_arrivals(write(tmp_path, "arrival_s\n0\n3\n"))[1] == Arrival(3.0, None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s\n", "trace trace.csv has no arrivals"),
        ("arrival_s,num_input_tokens\n1,0\n", "line 2: the input is 0 tokens long, it must be 1 or more"),
    ],
)
def test_a_trace_of_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        trace_arrivals(write(tmp_path, text))
