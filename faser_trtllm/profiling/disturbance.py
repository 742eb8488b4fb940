"""Detect other work on the machine during a measurement, by two signs that a quiet machine does not show."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

TASKS = Path("/proc/self/task")
MAX_WAITING = 0.1  # share of time for which threads of this process waited for a core, per measuring core
MAX_SPREAD = 0.25  # median over passes of (median / best - 1) of a pass's repeats
MIN_REPEATS = 3  # a pass with fewer repeats does not count


class Disturbance:
    """Watches the machine from its creation on. num_threads: those that measure, each on its own core."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._began_s, self._waited_s = time.perf_counter(), _waited_s()

    def warning(self, repeats_ms: Sequence[Sequence[float]]) -> str:
        """Return a sentence if the times cannot be trusted, else "". repeats_ms: times of the repeats of each pass."""
        share = (_waited_s() - self._waited_s) / max(1e-9, time.perf_counter() - self._began_s) / self._num_threads
        return describe(share, spread(repeats_ms))


def spread(repeats_ms: Sequence[Sequence[float]]) -> float:
    """Return the median over passes of (median / best - 1); 0 if none was repeated often enough."""
    known = [statistics.median(ms) / min(ms) - 1.0 for ms in repeats_ms if len(ms) >= MIN_REPEATS and min(ms) > 0.0]
    return statistics.median(known) if known else 0.0


def describe(waiting: float, repeats_spread: float) -> str:
    """Return a warning about a share of time without a core or a spread of repeats, "" if both are normal."""
    signs = []
    if waiting > MAX_WAITING:
        signs.append(f"its threads waited for a core {100 * min(waiting, 1.0):.0f} % of the time")
    if repeats_spread > MAX_SPREAD:
        signs.append(f"the same pass took {100 * repeats_spread:.0f} % longer in the median than at best")
    if not signs:
        return ""
    return (
        f"the costs were measured while other work slowed this machine ({' and '.join(signs)}), so drafting may be "
        "misjudged; stop the other work and run `faser profile` again"
    )


def _waited_s() -> float:
    """Return the seconds for which this process's threads waited for a core; 0 unless Linux reports it."""
    waited_ns = 0
    for task in TASKS.glob("*/schedstat"):
        try:
            waited_ns += int(task.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has ended
            continue
    return 1e-9 * waited_ns
