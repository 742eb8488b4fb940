"""How much other work got in the way of a measurement: two signs, neither of which a quiet machine shows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

TASKS = Path("/proc/self/task")
MAX_WAITING = 0.1  # share of the time that a thread of this process, on average per core, was ready but had no core
MAX_SPREAD = 0.25  # by which the median of a pass's repeats is above their best, in the middle of all passes
MIN_REPEATS = 3  # of a pass, before they say anything


class Disturbance:
    """Watches the machine from its creation on. num_units: cores whose threads measure."""

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self._began_s, self._waited_s = time.perf_counter(), _waited_s()

    def warning(self, repeats_ms: Sequence[Sequence[float]]) -> str:
        """One sentence if the times cannot be trusted, else nothing. repeats_ms: by pass, what each repeat took."""
        share = (_waited_s() - self._waited_s) / max(1e-9, time.perf_counter() - self._began_s) / self._num_units
        return describe(share, spread(repeats_ms))


def spread(repeats_ms: Sequence[Sequence[float]]) -> float:
    """The median over passes of (median / best - 1); 0 where none was repeated often enough."""
    known = [statistics.median(ms) / min(ms) - 1.0 for ms in repeats_ms if len(ms) >= MIN_REPEATS and min(ms) > 0.0]
    return statistics.median(known) if known else 0.0


def describe(waiting: float, repeats_spread: float) -> str:
    """The sentence for a share of time spent waiting for a core and a spread of repeats; "" if both are as usual."""
    signs = []
    if waiting > MAX_WAITING:
        signs.append(f"its threads waited for a core {100 * min(waiting, 1.0):.0f} % of the time")
    if repeats_spread > MAX_SPREAD:
        signs.append(f"the same pass took {100 * repeats_spread:.0f} % longer in the median than at best")
    if not signs:
        return ""
    return (
        f"the costs were measured while other work slowed this machine ({' and '.join(signs)}), so drafting may be "
        "priced wrongly; stop the other work and run `faser profile` again"
    )


def _waited_s() -> float:
    """Seconds that threads of this process were ready to run and had no core, where the kernel (Linux) tells."""
    waited_ns = 0
    for task in TASKS.glob("*/schedstat"):
        try:
            waited_ns += int(task.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has ended
            continue
    return 1e-9 * waited_ns
