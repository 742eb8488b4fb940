"""Results of the policy bench as values and JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.stats import Summary, paired_ratio, summarize
from benchmarks.policies.best_rival import MeanRatio, ratio_to_best
from benchmarks.policies.options import OFF

FloatArray = npt.NDArray[np.float64]

FORMAT_VERSION = 1
BURSTY = "bursty"
COMPUTE_BOUND_CONCURRENCY = 8  # from here on a CPU's target pass grows with its rows


@dataclass(frozen=True)
class Round:
    """One run of a system on a workload. share_pruned: of started draft rows. modes: share of steps.

    oracle: the oracle's time over the real time (oracle.py). draft_len: pending drafts per request and step.
    """

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    per_token_p50_ms: float
    per_token_p99_ms: float
    acceptance: float | None
    rows_per_token: float
    share_pruned: float
    oracle: float
    draft_len: float
    draft_share: float
    modes: dict[str, float]


@dataclass(frozen=True)
class Case:
    """A system on a workload. rounds: interleaved with those of other systems, after a warm-up."""

    expand: int
    workload: str
    system: str
    rounds: tuple[Round, ...]

    def rates(self) -> list[float]:
        return [r.tokens_per_s for r in self.rounds]

    def median(self, name: str) -> float | None:
        values = [getattr(r, name) for r in self.rounds if getattr(r, name) is not None]
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Calibration:
    """Calibration of a survival estimator's predictions, in bins of equal width over [0, 1].

    ece: the expected calibration error, which is the mean distance between prediction and rate, weighted by the counts.
    predicted, observed: the mean prediction and the rate, nan in empty bins.
    """

    expand: int
    system: str
    ece: float
    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    count: tuple[float, ...]

    @staticmethod
    def of(expand: int, system: str, count: FloatArray, predicted: FloatArray, passed: FloatArray) -> Calibration:
        """count, predicted, passed: by bin, the number of predictions, their sum, and how many came true."""
        ece = float(np.abs(predicted - passed).sum() / count.sum())
        with np.errstate(invalid="ignore"):
            means, rates = predicted / count, passed / count
        return Calibration(expand, system, ece, tuple(means.tolist()), tuple(rates.tolist()), tuple(count.tolist()))


@dataclass(frozen=True)
class Timeline:
    """A bursty run in bins: seconds since the start without idle time, running requests, drafts per request."""

    expand: int
    system: str
    seconds: tuple[float, ...]
    num_requests: tuple[float, ...]
    draft_len: tuple[float, ...]
    tokens_per_s: tuple[float, ...]


@dataclass(frozen=True)
class PolicyBenchReport:
    environment: dict[str, Any]
    options: dict[str, Any]
    prompts: dict[str, Any]
    cost_error: dict[str, dict[str, float]]  # MAPE of the cost tables by form
    cases: tuple[Case, ...]
    calibrations: tuple[Calibration, ...]
    timelines: tuple[Timeline, ...]
    differences: tuple[str, ...]  # first differences of a system's tokens from those of `off`
    absences: tuple[str, ...]  # systems that did not run, with reasons
    minutes: float
    bounds: dict[str, float] = field(default_factory=dict)  # by form, see bound.py

    @property
    def is_exact(self) -> bool:
        return not self.differences

    def forms(self) -> list[int]:
        return list(dict.fromkeys(case.expand for case in self.cases))

    def workloads(self, expand: int) -> list[str]:
        return list(dict.fromkeys(case.workload for case in self.cases if case.expand == expand))

    def select(self, expand: int, workload: str) -> dict[str, Case]:
        return {c.system: c for c in self.cases if c.expand == expand and c.workload == workload}

    def best_fixed(self, expand: int, workload: str) -> Case | None:
        """Return the fixed length with the highest median on this workload, chosen after the run."""
        return fastest(case for name, case in self.select(expand, workload).items() if name.startswith("fixed:"))

    def ratio(self, case: Case, base: Case) -> Summary:
        n = min(len(case.rounds), len(base.rounds))
        return paired_ratio(case.rates()[:n], base.rates()[:n])

    def ratio_to_best(self, expand: int, workload: str, system: str) -> float | None:
        """Return the ratio to the best of off, the best fixed length and the best uniform schedule."""
        cases = self.select(expand, workload)
        rivals = [c for c in (cases.get(OFF), self.best_fixed(expand, workload), cases.get("schedule")) if c]
        best = fastest(rivals)
        return self.ratio(cases[system], best).median if system in cases and best else None

    def mean_ratio_to_best(self, expand: int, workload: str, system: str) -> MeanRatio | None:
        """Return the ratio to the best of off, fixed lengths and schedule in other rounds; None below two rounds."""
        cases = self.select(expand, workload)
        rivals = [c.rates() for name, c in cases.items() if name in (OFF, "schedule") or name.startswith("fixed:")]
        if system not in cases or not rivals or min(map(len, [cases[system].rates(), *rivals])) < 2:
            return None
        return ratio_to_best(cases[system].rates(), rivals)

    def ratio_to_fixed(self, expand: int, workload: str, system: str) -> float | None:
        cases, best = self.select(expand, workload), self.best_fixed(expand, workload)
        return self.ratio(cases[system], best).median if system in cases and best else None

    def ablation(self, expand: int) -> dict[str, float]:
        """Return the geometric mean of tok/s against `off`, by system; "best fixed" is the best of each workload."""
        ratios: dict[str, list[float]] = {}
        for workload in self.workloads(expand):
            cases, best = self.select(expand, workload), self.best_fixed(expand, workload)
            if OFF not in cases:
                continue
            named = {name: case for name, case in cases.items() if not name.startswith("fixed:")}
            if best:
                named = {OFF: cases[OFF], "best fixed": best} | named
            for name, case in named.items():
                ratios.setdefault(name, []).append(self.ratio(case, cases[OFF]).median)
        return {name: geometric_mean(values) for name, values in ratios.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": FORMAT_VERSION,
            "environment": self.environment,
            "options": self.options,
            "prompts": self.prompts,
            "minutes": self.minutes,
            "exact": self.is_exact,
            "differences": list(self.differences),
            "absences": list(self.absences),
            "cost_error": self.cost_error,
            "bounds": self.bounds,
            "ablation": {str(expand): self.ablation(expand) for expand in self.forms()},
            "cases": [self._case(case) for case in self.cases],
            "calibrations": [asdict(c) for c in self.calibrations],
            "timelines": [asdict(t) for t in self.timelines],
        }

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(finite(self.to_dict()), indent=1, allow_nan=False) + "\n")

    def _case(self, case: Case) -> dict[str, Any]:
        off = self.select(case.expand, case.workload).get(OFF)
        return asdict(case) | {
            "median_tokens_per_s": summarize(case.rates()).median,
            "ratio_to_off": asdict(self.ratio(case, off)) if off else None,
            "ratio_to_best_fixed": self.ratio_to_fixed(case.expand, case.workload, case.system),
        }


def fastest(cases: Iterable[Case]) -> Case | None:
    return max(cases, key=lambda case: summarize(case.rates()).median, default=None)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; nan without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def finite(value: Any) -> Any:
    """Replace NaN by null for JSON."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
