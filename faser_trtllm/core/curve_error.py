"""How far a cost curve is off, and the choice between a curve with slopes and one without by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from faser_trtllm.core.cost_curve import CostCurve, CostSample, fit_curve

REFIT_ERROR = 0.10  # above which stairs without slopes are tried
MAX_ERROR = 0.15  # above which a curve is measured again, and then left out where another can stand for it


@dataclass(frozen=True)
class CurveError:
    """Mean absolute relative errors of a curve, None where there was nothing to compare with; in_sample: on what was
    fitted, held_out: on other samples.

    refitted: without slopes, which fits better. left_out: another curve stands for it.
    """

    in_sample: float | None = None
    held_out: float | None = None
    refitted: bool = False
    left_out: bool = False

    @property
    def worst(self) -> float:
        return max(self.in_sample or 0.0, self.held_out or 0.0)


def fit_judged(samples: Sequence[CostSample], held_out: Sequence[CostSample]) -> tuple[CostCurve, CurveError]:
    """The curve of samples of one kind and partition, and its errors."""
    curve = fit_curve(samples)
    error = _error_of(curve, samples, held_out)
    if error.worst > REFIT_ERROR and leave_one_out(samples, slopes=False) < leave_one_out(samples, slopes=True):
        curve = fit_curve(samples, slopes=False)
        error = replace(_error_of(curve, samples, held_out), refitted=True)
    return curve, error


def mean_error(curve: CostCurve, samples: Sequence[CostSample]) -> float:
    """Mean absolute relative error."""
    predicted = (curve.at(s.num_rows, s.num_requests, s.context_len) for s in samples)
    return float(np.mean([abs(ms - s.ms) / s.ms for ms, s in zip(predicted, samples, strict=True)]))


def leave_one_out(samples: Sequence[CostSample], *, slopes: bool) -> float:
    """Mean absolute relative error at each sample of the curve that was fitted to the others; 0 for one sample."""
    if len(samples) < 2:
        return 0.0
    errors = []
    for i, left in enumerate(samples):
        others = [*samples[:i], *samples[i + 1 :]]
        errors.append(mean_error(fit_curve(others, slopes=slopes), [left]))
    return float(np.mean(errors))


def _error_of(curve: CostCurve, samples: Sequence[CostSample], held_out: Sequence[CostSample]) -> CurveError:
    return CurveError(mean_error(curve, samples), mean_error(curve, held_out) if held_out else None)
