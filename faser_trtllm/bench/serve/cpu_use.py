"""CPU use during a measurement, by the bench, the service and everything else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from faser_trtllm.bench.environment import MAX_FOREIGN_SHARE, core_seconds


@dataclass(frozen=True)
class CpuUse:
    """Shares of total core time. service, other: None if the service's processes are not visible to us.

    other: other processes, and time stolen by other virtual machines.
    """

    bench: float
    service: float | None
    other: float | None

    @property
    def is_disturbed(self) -> bool:
        return self.other is not None and self.other > MAX_FOREIGN_SHARE


class CpuMeter:
    """Counts from its creation. service_cpu_s: CPU time of the service so far; None if it is not visible to us.

    is_alone: no service takes part, so everything except the bench counts as other.
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
        """Seconds of all cores: total, busy or stolen, used by this process, used by the service."""
        total, busy, steal = core_seconds()
        service = self._service_cpu_s() if self._service_cpu_s is not None else 0.0
        return total, busy + steal, time.process_time(), service
