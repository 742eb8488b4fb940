"""Detect memory growth of a process by a robust slope of its resident memory."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.watch import ENGINE, Sample

MIB = float(1 << 20)
_MAX_POINTS = 150
_MIN_RESTS = 6  # for a trend
_MIN_MINUTES = 5.0  # of a trend per hour
_MAX_SETTLE_S = 30.0  # time in which an engine child first touches its memory


@dataclass(frozen=True)
class Growth:
    """Growth of one role. mib: slope times time over the run, or over one life of an engine child if that is more."""

    role: str
    mib: float
    mib_per_hour: float
    first_mib: float
    last_mib: float
    num_lives: int


@dataclass(frozen=True)
class Trend:
    """A least-squares line through a role's anonymous memory at num_points rests. error: the slope's standard error."""

    role: str
    mib_per_hour: float
    error: float
    num_points: int
    minutes: float


def fit_trends(rests: Sequence[Sample]) -> list[Trend]:
    """Return each role's trend over its last process; none for less than five minutes or six rests."""
    roles = dict.fromkeys(role for rest in rests for role in rest.processes)
    return [trend for role in roles if (trend := _trend(rests, role)) is not None]


def _trend(rests: Sequence[Sample], role: str) -> Trend | None:
    found = [(rest.at_s / 3600, rest.processes[role]) for rest in rests if role in rest.processes]
    last = [(hours, process.anon_bytes / MIB) for hours, process in found if process.pid == found[-1][1].pid]
    minutes = 60 * (last[-1][0] - last[0][0])
    if len(last) < _MIN_RESTS or minutes < _MIN_MINUTES:
        return None
    hours, mib = [x for x, _ in last], [y for _, y in last]
    fit = statistics.linear_regression(hours, mib)
    mean = statistics.fmean(hours)
    residual = sum((y - fit.slope * x - fit.intercept) ** 2 for x, y in last)
    error = math.sqrt(residual / (len(last) - 2) / sum((x - mean) ** 2 for x in hours))
    return Trend(role, fit.slope, error, len(last), minutes)


def count_lives(samples: Sequence[Sample]) -> dict[str, int]:
    """Return the number of processes that each role had."""
    pids = {(role, process.pid) for sample in samples for role, process in sample.processes.items()}
    return Counter(role for role, _ in pids)


def measure_growth(samples: Sequence[Sample]) -> list[Growth]:
    """Return the growth of each role with samples, in order of appearance."""
    roles = dict.fromkeys(role for sample in samples for role in sample.processes)
    return [growth for role in roles if (growth := _growth(samples, role)) is not None]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the Theil-Sen slope, the median over all pairs; 0 for fewer than two points."""
    step = -(-len(points) // _MAX_POINTS)
    pairs = itertools.combinations(points[:: max(1, step)], 2)
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairs if x1 > x0]
    return statistics.median(slopes) if slopes else 0.0


def _growth(samples: Sequence[Sample], role: str) -> Growth | None:
    lives = _lives(samples, role)
    settled = [point for life in lives for point in life]
    if len(settled) < 3:
        return None
    overall = slope(settled)
    mib = overall * (settled[-1][0] - settled[0][0])
    if role == ENGINE:
        # Every life may grow equally, which the slope over all lives does not show.
        mib = max(mib, statistics.median(slope(life) * (life[-1][0] - life[0][0]) for life in lives))
    tenth = max(1, len(settled) // 10)
    return Growth(
        role,
        mib,
        3600.0 * overall,
        statistics.median(y for _, y in settled[:tenth]),
        statistics.median(y for _, y in settled[-tenth:]),
        len(lives),
    )


def _lives(samples: Sequence[Sample], role: str) -> list[list[tuple[float, float]]]:
    """Return (seconds, MiB) of each process with the role, without an engine child's start."""
    lives: dict[int, list[tuple[float, float]]] = {}
    for sample in samples:
        process = sample.processes.get(role)
        if process is not None:
            lives.setdefault(process.pid, []).append((sample.at_s, process.rss_bytes / MIB))
    if role != ENGINE:
        return list(lives.values())
    settled = []
    for life in lives.values():
        settle_s = min(_MAX_SETTLE_S, (life[-1][0] - life[0][0]) / 2)
        settled.append([point for point in life if point[0] - life[0][0] >= settle_s])
    return [life for life in settled if life]
