"""When requests of `faser bench serve` arrive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from faser_trtllm.bench.serve.arrivals import Arrival, gamma, poisson, read_trace, square_bursts
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


def test_a_trace_in_our_columns_is_sorted_scaled_and_starts_at_zero(tmp_path: Path) -> None:
    path = write(tmp_path, "num_output_tokens,arrival_s,num_input_tokens\n7,12.5,30\n8,10,40\n9,11,50\n")
    assert read_trace(path) == (Arrival(0.0, 40, 8), Arrival(1.0, 50, 9), Arrival(2.5, 30, 7))
    assert [a.arrival_s for a in read_trace(path, time_scale=0.5)] == [0.0, 0.5, 1.25]
    assert read_trace(path, num_requests=1) == (Arrival(0.0, 30, 7),)


def test_an_azure_trace_over_midnight(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.9000000,4808,10\n2023-11-17 00:00:00.4000000,3180,8\n2024-05-10 00:00:01,110,27\n",
    )
    arrivals = read_trace(path, 2)
    assert arrivals[1].arrival_s == pytest.approx(0.5, abs=1e-6)
    assert (arrivals[0].num_input_tokens, arrivals[1].num_output_tokens) == (4808, 8)


def test_a_trace_of_times_only_leaves_lengths_open(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, "arrival_s\n0\n3\n"))[1] == Arrival(3.0, None, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace trace.csv has no column arrival_s or TIMESTAMP; add one to its header"),
        ("when\n1\n", "has no column arrival_s or TIMESTAMP"),
        ("arrival_s\n", "trace trace.csv has no arrivals"),
        ("arrival_s\n1\nsoon\n", "trace trace.csv line 3: arrival_s is 'soon', it must be seconds or a date and time"),
        ("arrival_s\nnan\n", "line 2: arrival_s is 'nan'"),
        ("TIMESTAMP\n2023-11-16 25:00:00\n", "TIMESTAMP is '2023-11-16 25:00:00'"),
        ("arrival_s,num_input_tokens\n1,0\n", "num_input_tokens is '0', it must be a whole number of 1 or more"),
        ("arrival_s,num_output_tokens\n1,2.5\n", "num_output_tokens is '2.5'"),
        ("arrival_s,num_output_tokens\n1\n", "num_output_tokens is None"),
    ],
)
def test_a_bad_trace_is_told_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_trace(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"trace gone\.csv cannot be read: No such file"):
        read_trace(tmp_path / "gone.csv")
    (tmp_path / "trace.csv").write_bytes(b"arrival_s\n\xff\n")
    with pytest.raises(InvalidArgumentError, match="it is not a CSV file in UTF-8"):
        read_trace(tmp_path / "trace.csv")
