"""Overhead of Triton, our backend in it and gRPC: the service against the in-process executor, alternating."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from faser_trtllm.bench.serve.cpu_use import CpuMeter, CpuUse
from faser_trtllm.bench.serve.outcome import Ending, Outcome
from faser_trtllm.bench.serve.summary import Distribution, distribution
from faser_trtllm.bench.serve.workload import ServeJob
from faser_trtllm.bench.stats import Summary, paired_ratio
from faser_trtllm.errors import FaserError

RunClosed = Callable[[Sequence[ServeJob], int], list[Outcome]]


@dataclass(frozen=True)
class Side:
    """One round of one side. cpu.bench: the client's own work; in process, everything."""

    tokens_per_s: float
    seconds: float
    cpu: CpuUse
    ttft: Distribution | None
    tpot: Distribution | None


@dataclass(frozen=True)
class OverheadReport:
    """rounds: (in process, served) pairs on the same jobs. num_different: requests with different tokens on the two
    sides, out of num_compared."""

    concurrency: int
    num_requests: int
    rounds: tuple[tuple[Side, Side], ...]
    num_different: int
    num_compared: int

    @property
    def served_share(self) -> Summary:
        """Throughput of the service relative to in process, per round."""
        return paired_ratio(
            [served.tokens_per_s for _, served in self.rounds], [own.tokens_per_s for own, _ in self.rounds]
        )

    @property
    def overhead(self) -> float:
        """1 minus the median of served_share."""
        return 1.0 - self.served_share.median


def compare(
    rounds: Sequence[Sequence[ServeJob]],
    concurrency: int,
    in_process: RunClosed,
    served: RunClosed,
    service_cpu_s: Callable[[], float] | None,
    log: Callable[[str], None],
) -> OverheadReport:
    """Run both sides on each round's jobs; the first round is a dropped warm-up, and the sides alternate in going
    first.

    Raises FaserError if a request fails: a round with fewer tokens is not comparable.
    """
    pairs: list[tuple[Side, Side]] = []
    num_different = num_compared = 0
    for number, jobs in enumerate(rounds):
        order = ("in process", "served") if number % 2 == 0 else ("served", "in process")
        sides: dict[str, Side] = {}
        token_ids: dict[str, list[list[int]]] = {}
        for name in order:
            is_served = name == "served"
            meter = CpuMeter(service_cpu_s, is_alone=not is_served)
            outcomes = (served if is_served else in_process)(jobs, concurrency)
            sides[name] = _side(outcomes, meter.use())
            token_ids[name] = [outcome.token_ids for outcome in outcomes]
        num_compared += len(jobs)
        num_different += sum(
            left != right for left, right in zip(token_ids["in process"], token_ids["served"], strict=True)
        )
        rates = ", ".join(f"{name} {sides[name].tokens_per_s:.0f} tok/s" for name in order)
        log(f"round {number}{'' if number else ' (dropped)'}: {rates}")
        if number:
            pairs.append((sides["in process"], sides["served"]))
    return OverheadReport(concurrency, len(rounds[0]), tuple(pairs), num_different, num_compared)


def _side(outcomes: Sequence[Outcome], cpu: CpuUse) -> Side:
    for number, outcome in enumerate(outcomes):
        if outcome.ending is not Ending.COMPLETED:
            raise FaserError(f"request {number} of a round failed ({outcome.error}); the comparison needs all of them")
    seconds = max(outcome.ended_s for outcome in outcomes)
    return Side(
        tokens_per_s=sum(outcome.num_tokens for outcome in outcomes) / seconds,
        seconds=seconds,
        cpu=cpu,
        ttft=distribution([o.ttft_s for o in outcomes if o.ttft_s is not None]),
        tpot=distribution([o.tpot_s for o in outcomes if o.tpot_s is not None]),
    )
