"""The results of a bench run as values and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.agreement import Agreement
from benchmarks.common.stats import Summary, paired_ratio, summarize

FASER = "faser"
OFF = "off"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Form:
    """One form of the target: as trained, or the same function with expand times the layers."""

    expand: int
    num_layers: int

    @property
    def label(self) -> str:
        if self.expand == 1:
            return f"{self.num_layers} layers, as trained"
        return f"{self.num_layers} layers, enlarged x{self.expand} (same function and acceptance, higher cost)"


@dataclass(frozen=True)
class CaseResult:
    """One system in one setting at one batch size. Counts and times_ms are sums over the measured rounds.

    tokens_per_s: per round, including the prefill. times_ms: phases of our executor's steps; empty for peers.
    agreement: with our tokens at speculation off and the first batch size.
    """

    expand: int
    system: str
    setting: str
    batch_size: int
    tokens_per_s: tuple[float, ...]
    seconds: float
    num_output_tokens: int
    num_target_passes: int
    num_draft_tokens: int
    num_accepted_tokens: int
    agreement: Agreement
    times_ms: dict[str, float] = field(default_factory=dict)

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted tokens; None if nothing was drafted or the system does not report it."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def tokens_per_pass(self) -> float:
        """Committed tokens per request and target pass."""
        return self.num_output_tokens / self.num_target_passes

    def share(self, phase: str) -> float | None:
        """Share of the wall time spent in a phase; None if the system does not report it."""
        return self.times_ms[phase] / (1e3 * self.seconds) if phase in self.times_ms else None


@dataclass(frozen=True)
class StepResult:
    """Latency of one forward pass, ms per round; one row per request, from 8 rows on four per request."""

    expand: int
    system: str
    num_rows: int
    step_ms: tuple[float, ...]


@dataclass(frozen=True)
class Exactness:
    """Agreement of our tokens over all settings and batch sizes; difference: the first one."""

    expand: int
    num_cases: int
    num_sequences: int
    difference: str | None


@dataclass(frozen=True)
class Absence:
    """A requested peer that did not run, or not as requested."""

    expand: int
    system: str
    reason: str
    fix: str


@dataclass(frozen=True)
class BenchReport:
    environment: dict[str, Any]
    options: dict[str, Any]
    prompts: dict[str, Any]
    forms: tuple[Form, ...]
    cases: tuple[CaseResult, ...]
    steps: tuple[StepResult, ...]
    exactness: tuple[Exactness, ...]
    absences: tuple[Absence, ...]

    @property
    def is_exact(self) -> bool:
        """True if speculation and batching changed no token."""
        return all(item.difference is None for item in self.exactness)

    def select(self, expand: int, batch_size: int | None = None, system: str | None = None) -> list[CaseResult]:
        return [
            case
            for case in self.cases
            if case.expand == expand and batch_size in (None, case.batch_size) and system in (None, case.system)
        ]

    def baseline(self, case: CaseResult) -> CaseResult:
        """Return our case without speculation, at the same form and batch size."""
        return next(c for c in self.select(case.expand, case.batch_size, FASER) if c.setting == OFF)

    def ratio_to_off(self, case: CaseResult) -> Summary:
        return paired_ratio(case.tokens_per_s, self.baseline(case).tokens_per_s)

    def best_speculation(self, expand: int, batch_size: int) -> CaseResult | None:
        """Return our fastest setting with speculation, chosen after the run."""
        ours = [c for c in self.select(expand, batch_size, FASER) if c.setting != OFF]
        return fastest(ours)

    def peers(self, expand: int, batch_size: int) -> list[CaseResult]:
        return [case for case in self.select(expand, batch_size) if case.system != FASER]

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": FORMAT_VERSION,
            "environment": self.environment,
            "options": self.options,
            "prompts": self.prompts,
            "exact": self.is_exact,
            "forms": [asdict(form) for form in self.forms],
            "cases": [self._case_dict(case) for case in self.cases],
            "steps": [asdict(step) | {"median_ms": summarize(step.step_ms).median} for step in self.steps],
            "exactness": [asdict(item) for item in self.exactness],
            "absences": [asdict(item) for item in self.absences],
        }

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def _case_dict(self, case: CaseResult) -> dict[str, Any]:
        peers = {} if case.system != FASER else self.peers(case.expand, case.batch_size)
        return asdict(case) | {
            "median_tokens_per_s": summarize(case.tokens_per_s).median,
            "ratio_to_off": asdict(self.ratio_to_off(case)),
            "ratio_to_peers": {
                f"{peer.system} {peer.setting}": asdict(paired_ratio(case.tokens_per_s, peer.tokens_per_s))
                for peer in peers
            },
            "acceptance": case.acceptance,
            "tokens_per_pass": case.tokens_per_pass,
        }


def fastest(cases: Iterable[CaseResult]) -> CaseResult | None:
    return max(cases, key=lambda case: summarize(case.tokens_per_s).median, default=None)
