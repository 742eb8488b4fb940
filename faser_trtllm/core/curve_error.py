"""Errors of cost curves against measurements, and the choice of the curves that are left out for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from faser_trtllm.core.cost_curve import CostCurve, CostSample, fit_curve

REFIT_ERROR = 0.10  # above this, a fit without slopes is tried
MAX_ERROR = 0.15  # above this, a curve is measured again, and then left out if another can stand in for it
STAND_INS = {"draft_rows": "draft_step", "decode": "verify"}  # by kind, the kind that stands in for it
FIRST_STEPS, FIRST_ROW_MS, CALL_MS = 3.0, 0.01, 1.0  # upper limit of a draft call's first pass: steps, ms per row, ms
USUAL_CONTEXT = 256
MAX_LEFT_OUT = 100  # samples, one fit each


@dataclass(frozen=True)
class CurveError:
    """Mean absolute relative errors of a curve; None without samples to compare with."""

    in_sample: float | None = None  # on the samples that were fitted
    held_out: float | None = None  # on other samples
    refitted: bool = False  # without slopes, which fits better
    left_out: bool = False  # another curve stands in for it

    @property
    def worst(self) -> float:
        return max(self.in_sample or 0.0, self.held_out or 0.0)

    @property
    def is_doubtful(self) -> bool:
        """Times predicted by this curve may be wrong."""
        return self.left_out or self.worst > MAX_ERROR


def fit_curves(
    samples: Iterable[CostSample], held_out: Iterable[CostSample] = (), sizes: tuple[int, ...] = ()
) -> tuple[dict[str, CostCurve], dict[str, CurveError]]:
    """Return curves by "kind@partition", and the errors of all curves, left-out ones included.

    A curve that is off by more than MAX_ERROR is left out if another kind can stand in for it. Otherwise it is kept:
    its best fit predicts drafting better than nothing. sizes: of CostCurve.
    """
    groups, judges = by_curve(samples), by_curve(held_out)
    curves: dict[str, CostCurve] = {}
    errors: dict[str, CurveError] = {}
    for key in sorted(groups, key=lambda key: not key.startswith("verify@")):  # first: others need its per_expert_ms
        per_expert_ms = _per_expert_ms(key, groups, curves)
        curves[key], errors[key] = _fit(groups[key], judges.get(key, ()), sizes, per_expert_ms)
    return leave_out({key: curves[key] for key in groups}, {key: errors[key] for key in groups})


def _per_expert_ms(
    key: str, groups: Mapping[str, Sequence[CostSample]], curves: Mapping[str, CostCurve]
) -> float | None:
    """Return per_expert_ms of a curve whose samples cannot tell experts from rows; None if they can.

    Steps without drafts run one row per request, and segments are measured in few passes. They take the value of whole
    passes, a segment in proportion to its time.
    """
    kind, _, partition = key.partition("@")
    whole = curves.get(f"verify@{partition}")
    is_segment = kind.startswith("segment:")
    if whole is None or not (is_segment or kind == "decode"):
        return None
    if not is_segment:
        return whole.per_expert_ms
    times_ms = {name: sum(s.ms for s in group) for name, group in groups.items() if name.startswith("segment:")}
    return whole.per_expert_ms * times_ms[key] / sum(times_ms.values())


def leave_out(
    curves: Mapping[str, CostCurve], errors: Mapping[str, CurveError]
) -> tuple[dict[str, CostCurve], dict[str, CurveError]]:
    """Return the curves without doubtful ones that another can stand in for, and the errors with these marked."""
    kept, judged = dict(curves), dict(errors)
    for key, curve in curves.items():
        kind, _, partition = key.partition("@")
        error = errors.get(key, CurveError())
        stand_in = curves.get(f"{STAND_INS.get(kind)}@{partition}")
        if stand_in is not None and (error.is_doubtful or (kind == "draft_rows" and _is_absurd(curve, stand_in))):
            del kept[key]
            judged[key] = replace(error, left_out=True)
    return kept, judged


def by_curve(samples: Iterable[CostSample]) -> dict[str, list[CostSample]]:
    groups: dict[str, list[CostSample]] = {}
    for sample in samples:
        groups.setdefault(sample.curve, []).append(sample)
    return groups


def describe(errors: Mapping[str, CurveError]) -> str:
    """Return one sentence about the doubtful curves, "" if there are none."""
    found = []
    for key, error in sorted(errors.items()):
        if not error.is_doubtful:
            continue
        how = f"is off by {100 * error.worst:.0f} %" if error.worst > MAX_ERROR else "costs more than such passes do"
        kind = key.partition("@")[0]
        found.append(
            f"{key} {how}" + (f" and is replaced by {STAND_INS.get(kind, 'others')}" if error.left_out else "")
        )
    if not found:
        return ""
    return (
        f"the cost table does not fit what was measured ({', '.join(found)}), so draft lengths may be chosen badly; "
        "run `faser profile` again on an idle machine"
    )


def mean_error(curve: CostCurve, samples: Sequence[CostSample]) -> float:
    """Return the mean absolute relative error of a curve on samples."""
    predicted = (curve.at(s.num_rows, s.num_requests, s.context_len, s.num_experts) for s in samples)
    return float(np.mean([abs(ms - s.ms) / s.ms for ms, s in zip(predicted, samples, strict=True)]))


def leave_one_out(
    samples: Sequence[CostSample],
    *,
    slopes: bool,
    sizes: tuple[int, ...] = (),
    per_expert_ms: float | None = None,
) -> float:
    """Return the mean absolute relative error on samples that each curve was fitted without; 0 for one sample. At most
    MAX_LEFT_OUT samples are left out, one at a time."""
    if len(samples) < 2:
        return 0.0
    errors = []
    for i in range(0, len(samples), 1 + len(samples) // MAX_LEFT_OUT):
        others = [*samples[:i], *samples[i + 1 :]]
        curve = fit_curve(others, slopes=slopes, sizes=sizes, per_expert_ms=per_expert_ms)
        errors.append(mean_error(curve, samples[i : i + 1]))
    return float(np.mean(errors))


def _fit(
    samples: Sequence[CostSample],
    held_out: Sequence[CostSample],
    sizes: tuple[int, ...],
    per_expert_ms: float | None,
) -> tuple[CostCurve, CurveError]:
    curve = fit_curve(samples, sizes=sizes, per_expert_ms=per_expert_ms)
    error = _error_of(curve, samples, held_out)
    if error.worst > REFIT_ERROR:
        without, with_slopes = (
            leave_one_out(samples, slopes=slopes, sizes=sizes, per_expert_ms=per_expert_ms) for slopes in (False, True)
        )
        if without < with_slopes:
            curve = fit_curve(samples, slopes=False, sizes=sizes, per_expert_ms=per_expert_ms)
            error = replace(_error_of(curve, samples, held_out), refitted=True)
    return curve, error


def _error_of(curve: CostCurve, samples: Sequence[CostSample], held_out: Sequence[CostSample]) -> CurveError:
    return CurveError(mean_error(curve, samples), mean_error(curve, held_out) if held_out else None)


def _is_absurd(first: CostCurve, step: CostCurve) -> bool:
    """Return True if the first pass of a draft call would take longer than any such pass does."""
    return any(
        first.at(n, n, USUAL_CONTEXT) > FIRST_STEPS * step.at(n, n, USUAL_CONTEXT) + FIRST_ROW_MS * n + CALL_MS
        for n in first.rows
    )
