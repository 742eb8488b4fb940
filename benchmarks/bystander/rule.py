"""The bystander rule, which limits the effect of a request on a second client."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.bystander.attack import Sent
from benchmarks.bystander.canary import Heard
from benchmarks.bystander.cases import Case

RATIO = 2.0
SLACK_MS = 100.0
MAX_MS = 500.0


@dataclass(frozen=True)
class Delay:
    """The p99 and the maximum of delays that the canary saw, in ms."""

    p99: float
    max: float

    @staticmethod
    def of(times_ms: Sequence[float]) -> Delay:
        if len(times_ms) < 2:
            return Delay(max(times_ms, default=0.0), max(times_ms, default=0.0))
        return Delay(statistics.quantiles(times_ms, n=100, method="inclusive")[98], max(times_ms))

    def is_within(self, alone: Delay) -> bool:
        """Return True if this delay keeps the rule compared with `alone`, the run without the attacker."""
        return self.p99 <= max(RATIO * alone.p99, alone.p99 + SLACK_MS) and self.max <= max(MAX_MS, RATIO * alone.max)


@dataclass(frozen=True)
class Outcome:
    """Result of one case. sent: outcome of its requests. heard: the canary's delays during the attack.

    alone: its delays during as many plain sequences, or without load if the case is refused.
    """

    case: Case
    sent: Sent
    heard: Heard
    alone: Heard
    trouble: str = ""

    @property
    def delays(self) -> dict[str, tuple[Delay, Delay]]:
        """Return the delays of the first token and between tokens, each as (with the attack, without it)."""
        return {
            "first token": (Delay.of(self.heard.first_ms), Delay.of(self.alone.first_ms)),
            "gap": (Delay.of(self.heard.gaps_ms), Delay.of(self.alone.gaps_ms)),
        }

    @property
    def is_kept(self) -> bool:
        return not self.trouble and all(found.is_within(alone) for found, alone in self.delays.values())

    @property
    def worst_ms(self) -> float:
        return max(found.max for found, _ in self.delays.values())
