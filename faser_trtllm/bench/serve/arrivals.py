"""Arrival times and lengths of requests in an open loop: Poisson, bursty, or from a trace."""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from faser_trtllm.errors import InvalidArgumentError

TIME_COLUMNS = ("arrival_s", "TIMESTAMP")
INPUT_COLUMNS = ("num_input_tokens", "ContextTokens")
OUTPUT_COLUMNS = ("num_output_tokens", "GeneratedTokens")
"""Columns of a trace: our names, and those of the Azure LLM inference traces."""


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


def read_trace(path: Path, num_requests: int | None = None, time_scale: float = 1.0) -> tuple[Arrival, ...]:
    """Arrivals of a CSV file with a header, sorted by time, the first at 0; gaps are multiplied by time_scale.

    Columns: arrival_s in seconds or TIMESTAMP as a date and time; num_input_tokens or ContextTokens, num_output_tokens
    or GeneratedTokens, either may be missing. num_requests: maximum number to read. Raises InvalidArgumentError.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            time_column = _column(columns, TIME_COLUMNS)
            if time_column is None:
                raise InvalidArgumentError(
                    f"trace {path.name} has no column {' or '.join(TIME_COLUMNS)}; add one to its header"
                )
            lengths = [_column(columns, INPUT_COLUMNS), _column(columns, OUTPUT_COLUMNS)]
            arrivals: list[Arrival] = []
            for row in reader:
                if num_requests is not None and len(arrivals) == num_requests:
                    break
                where = f"trace {path.name} line {reader.line_num}"
                num_input, num_output = (None if name is None else _length(where, name, row[name]) for name in lengths)
                arrivals.append(Arrival(_seconds(where, time_column, row[time_column]), num_input, num_output))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or "it is not a CSV file in UTF-8"
        raise InvalidArgumentError(f"trace {path.name} cannot be read: {reason}") from error
    if not arrivals:
        raise InvalidArgumentError(f"trace {path.name} has no arrivals; add at least one line behind the header")
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    first_s = arrivals[0].arrival_s
    return tuple(
        Arrival((a.arrival_s - first_s) * time_scale, a.num_input_tokens, a.num_output_tokens) for a in arrivals
    )


def _at(times_s: npt.NDArray[np.float64]) -> tuple[Arrival, ...]:
    return tuple(Arrival(float(time_s)) for time_s in times_s)


def _column(columns: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _seconds(where: str, name: str, text: str | None) -> float:
    """Seconds, or a date and time whose fraction may have more digits than datetime supports."""
    try:
        seconds = float(text or "")
    except ValueError:
        head, _, fraction = (text or "").partition(".")
        digits = fraction.partition("+")[0].rstrip("Z")
        try:
            moment = datetime.datetime.fromisoformat(head).replace(tzinfo=datetime.timezone.utc)
            seconds = moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)
        except ValueError:
            seconds = math.nan
    if not math.isfinite(seconds):
        raise InvalidArgumentError(f"{where}: {name} is {text!r}, it must be seconds or a date and time")
    return seconds


def _length(where: str, name: str, text: str | None) -> int:
    if text is None or not text.isascii() or not text.isdigit() or not 1 <= int(text) < 2**31:
        raise InvalidArgumentError(f"{where}: {name} is {text!r}, it must be a whole number of 1 or more")
    return int(text)
