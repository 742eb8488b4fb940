"""Measurements of the host's steps, and their medians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common.stats import Summary, paired_ratio, summarize
from benchmarks.host.options import NULL


@dataclass(frozen=True)
class HostStep:
    """One measurement. reference_us: the loop in C, just before. parts_us: by host_step.PARTS of its engines.

    idle_us: idle time of a GPU, None for other engines.
    """

    system: str
    num_requests: int
    number: int  # of its round
    reference_us: float
    parts_us: Mapping[str, float]
    idle_us: float | None = None

    @property
    def us(self) -> float:
        """Time of the whole step, with at most the host's part of engines."""
        return sum(self.parts_us.values())


@dataclass(frozen=True)
class HostBenchReport:
    """The report. costs: source of the modeled times for policies. engines: one of options.ENGINES."""

    environment: Mapping[str, Any]
    costs: str
    steps: Sequence[HostStep]
    engines: str = NULL

    @property
    def systems(self) -> list[str]:
        return list(dict.fromkeys(step.system for step in self.steps))

    @property
    def sizes(self) -> list[int]:
        return sorted({step.num_requests for step in self.steps})

    @property
    def parts(self) -> list[str]:
        return list(dict.fromkeys(part for step in self.steps for part in step.parts_us))

    def select(self, system: str, num_requests: int) -> list[HostStep]:
        """Return the steps of a system and size by round."""
        return [step for step in self.steps if (step.system, step.num_requests) == (system, num_requests)]

    def us(self, system: str, num_requests: int) -> Summary:
        return summarize([step.us for step in self.select(system, num_requests)])

    def ratio(self, system: str, num_requests: int) -> Summary:
        """Return the ratio to the loop in C."""
        steps = self.select(system, num_requests)
        return paired_ratio([step.us for step in steps], [step.reference_us for step in steps])

    def part_us(self, system: str, num_requests: int, part: str) -> float:
        return summarize([step.parts_us[part] for step in self.select(system, num_requests)]).median

    def idle_us(self, system: str, num_requests: int) -> float | None:
        """Return the median idle time, None without a GPU."""
        found = [step.idle_us for step in self.select(system, num_requests) if step.idle_us is not None]
        return summarize(found).median if found else None

    def to_json(self) -> dict[str, Any]:
        return {
            "environment": dict(self.environment),
            "costs": self.costs,
            "engines": self.engines,
            "steps": [asdict(step) | {"us": step.us} for step in self.steps],
        }
