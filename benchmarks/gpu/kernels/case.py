"""One kernel at one shape: launches, check, and minimum memory traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu.bench import Bench


@dataclass(frozen=True)
class KernelCase:
    """One kernel at one shape.

    launches: calls on rotating input sets that are not in the L2 cache; None in a dry run without kernels.
    check: launches once and returns the largest error against the reference over the tolerance (at most 1 passes).
    num_bytes, num_flops: minimum per launch. peer: a different implementation, if any.
    For the model: more_bytes: that the kernels move beyond the minimum; num_issued: warp instructions of stretches that
    all warps execute; walks: (number, tokens) of the pieces of contexts that attention's blocks walk through.
    """

    op: str
    shape: str
    check: Callable[[], float]
    launches: tuple[Callable[[], object], ...] | None
    num_bytes: float
    num_flops: float = 0.0
    peer: tuple[Callable[[], object], ...] | None = None
    more_bytes: float = 0.0
    num_issued: float = 0.0
    walks: tuple[tuple[int, int], ...] = ()


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
    """Check, then time a kernel, also a wrong one, whose error is in the result."""
    error = case.check()
    bench.machine.synchronize()
    ms = bench.machine.time_ms(case.launches) if case.launches is not None else None
    peer_ms = None
    if case.peer is not None:
        peer_ms = bench.record.attempt(f"{case.op} {case.shape}, peer", lambda: bench.machine.time_ms(case.peer or ()))
    floor_ms = bench.ceilings().floor_ms(case.num_bytes, case.num_flops)
    return KernelResult(case.op, case.shape, error, ms, floor_ms, peer_ms)
