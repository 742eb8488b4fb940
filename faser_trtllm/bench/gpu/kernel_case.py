"""One kernel at one shape: how it is launched, checked, and what it must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from faser_trtllm.bench.gpu.bench import Bench


@dataclass(frozen=True)
class KernelCase:
    """launches: on input sets that rotate, so that the L2 cache does not hold them; None in a dry run without kernels.

    check: launches once and compares with the reference -> the largest error in units of what is allowed (at most 1 is
    right). num_bytes, num_flops: the fewest that a launch can do. peer: another implementation of the same, if any.
    """

    op: str
    shape: str
    check: Callable[[], float]
    launches: tuple[Callable[[], object], ...] | None
    num_bytes: float
    num_flops: float = 0.0
    peer: tuple[Callable[[], object], ...] | None = None


@dataclass(frozen=True)
class KernelResult:
    op: str
    shape: str
    error: float
    ms: float | None
    floor_ms: float
    peer_ms: float | None

    @property
    def roofline_share(self) -> float | None:
        return self.floor_ms / self.ms if self.ms else None


def measure_case(bench: Bench, case: KernelCase) -> KernelResult:
    """Check, then time: a kernel that is wrong is timed too, its error is in the result."""
    error = case.check()
    bench.machine.synchronize()
    ms = bench.machine.time_ms(case.launches) if case.launches is not None else None
    peer_ms = None
    if case.peer is not None:
        peer_ms = bench.record.attempt(f"{case.op} {case.shape}, peer", lambda: bench.machine.time_ms(case.peer or ()))
    floor_ms = bench.ceilings().floor_ms(case.num_bytes, case.num_flops)
    return KernelResult(case.op, case.shape, error, ms, floor_ms, peer_ms)
