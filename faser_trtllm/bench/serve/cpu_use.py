"""Who used the processor during a measurement: the bench, the service, and everybody else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faser_trtllm.bench.markdown import MAX_FOREIGN_SHARE


@dataclass(frozen=True)
class CpuUse:
    """Shares of all cores' time. service, other: None where the service's processes are not ours to see.

    other: of further processes, and what other virtual machines took.
    """

    bench: float
    service: float | None
    other: float | None

    @property
    def is_disturbed(self) -> bool:
        return self.other is not None and self.other > MAX_FOREIGN_SHARE


class CpuMeter:
    """Counts from its creation. service_cpu_s: processor time of the service so far; None if it is not ours.

    is_alone: there is no service in this measurement, what is not the bench is others'.
    """

    def __init__(self, service_cpu_s: Callable[[], float] | None, is_alone: bool = False) -> None:
        self._service_cpu_s: Callable[[], float] | None = (lambda: 0.0) if is_alone else service_cpu_s
        self._start = self._read()

    def use(self) -> CpuUse:
        total, busy, bench, service = (end - start for start, end in zip(self._start, self._read(), strict=True))
        total = max(total, 1e-9)
        if self._service_cpu_s is None:
            return CpuUse(bench / total, None, None)
        return CpuUse(bench / total, service / total, max(0.0, busy - bench - service) / total)

    def _read(self) -> tuple[float, float, float, float]:
        """Seconds: all cores together, busy or stolen, of this process, of the service."""
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, idle, iowait, irq, softirq, steal = (
            int(field) / os.sysconf("SC_CLK_TCK") for field in fields
        )
        busy = user + nice + system + irq + softirq + steal
        service = self._service_cpu_s() if self._service_cpu_s is not None else 0.0
        return busy + idle + iowait, busy, time.process_time(), service
